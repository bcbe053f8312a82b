"""Validation in numbers: accuracy, pass@k and majority votes per domain, from groups of scored responses."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from roll.configs.schema.reward_config import ValidationConfig
from roll.tracking.base import Sample
from roll.tracking.names import name_part
from roll.types.trajectory import Group, Trajectory
from roll.utils.seeding import keyed_rng

logger = logging.getLogger(__name__)


def pass_at_k(n: int, right: int, k: int) -> float:
    """Return the chance that one of k responses, drawn from n with `right` right ones, is right (arXiv:2107.03374)."""
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} responses, got {n}")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def extreme_of_k(rewards: Sequence[float], k: int, *, best: bool) -> float:
    """Return the mean over all draws of k of these rewards of the highest, or with `best` false the lowest, of a draw.

    Exact: the i-th lowest of n is the highest of C(i - 1, k - 1) of the C(n, k) draws. Mean@k is the mean itself.
    """
    if not 1 <= k <= len(rewards):
        raise ValueError(f"the best of {k} needs at least {k} responses, got {len(rewards)}")
    draws = math.comb(len(rewards), k)
    ordered = sorted(rewards, reverse=not best)
    return sum(reward * math.comb(i, k - 1) / draws for i, reward in enumerate(ordered))


def majority(answers: Sequence[str | None], right: Sequence[float]) -> float:
    """Return whether (1 or 0) the answer that most responses state is right: what the first of them is.

    As in verl: of answers that equally many state, the one that is stated first wins, and responses that state none
    (None) vote together.
    """
    votes = Counter(answers)  # in the order of first appearance, which `max` keeps to among equals
    return right[list(answers).index(max(votes, key=votes.__getitem__))]


_MAX_DRAWS = 1000


def majority_of_k(answers: Sequence[str | None], right: Sequence[float], k: int, *key: str) -> float:
    """Return the mean of `majority` over draws of k of these responses without replacement, each in their order.

    Over all draws if they are at most 1,000, else over 1,000 of them, which depend on `key` alone (the standard error
    of a mean of 1,000 draws is at most 0.016).
    """
    count = len(answers)
    if not 1 <= k <= count:
        raise ValueError(f"a vote of {k} needs at least {k} responses, got {count}")
    draws: Iterable[Sequence[int]]
    if math.comb(count, k) <= _MAX_DRAWS:
        draws = itertools.combinations(range(count), k)
    else:
        rng = keyed_rng("majority", *key)
        draws = [sorted(rng.permutation(count)[:k].tolist()) for _ in range(_MAX_DRAWS)]
    return fmean(majority([answers[i] for i in draw], [right[i] for i in draw]) for draw in draws)


def bootstrap_spread(values: Sequence[float], resamples: int, *key: str) -> float:
    """Return the standard error of the mean of `values`, by the bootstrap (Efron 1979).

    It is the standard deviation of the means of so many draws of all values with replacement, 2 or more; 0 for a single
    value. The draws depend on `key` alone.
    """
    drawn = keyed_rng("bootstrap", *key).integers(len(values), size=(resamples, len(values)))
    return float(np.asarray(values)[drawn].mean(axis=1).std(ddof=1))


def validation_metrics(groups: Sequence[Group], config: ValidationConfig) -> dict[str, float]:
    """Return metrics by name. A response without a score counts as failed, and is left out of every mean."""
    domains: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        domains[group.task.domain].append(group)
    values: dict[str, float] = {}
    accuracies: list[float] = []
    rewards: list[float] = []
    for domain, members in sorted(domains.items()):
        per_task = []
        named = name_part(domain)
        for group in members:
            right = [float(t.reward >= config.pass_threshold) for t in group.survivors]
            if right:
                per_task.append(right)
        scored = [t for group in members for t in group.survivors]
        failed = sum(len(group.trajectories) for group in members) - len(scored)
        values[f"val/{named}/failed"] = float(failed)
        if not per_task:
            continue
        of_tasks = [fmean(right) for right in per_task]
        accuracies += of_tasks
        values[f"val/{named}/accuracy"] = fmean(of_tasks)
        if config.bootstrap:
            values[f"val/{named}/accuracy_spread"] = bootstrap_spread(of_tasks, config.bootstrap, domain)
        rewards += [t.reward for t in scored]
        values[f"val/{named}/reward"] = fmean(t.reward for t in scored)
        values[f"val/{named}/length_mean"] = fmean(t.num_response_tokens for t in scored)
        for k in config.pass_at_k:
            enough = [right for right in per_task if len(right) >= k]
            if enough:
                values[f"val/{named}/pass_at_{k}"] = fmean(pass_at_k(len(r), int(sum(r)), k) for r in enough)
                drawn = [[t.reward for t in group.survivors] for group in members if len(group.survivors) >= k]
                values[f"val/{named}/best_at_{k}"] = fmean(extreme_of_k(r, k, best=True) for r in drawn)
                values[f"val/{named}/worst_at_{k}"] = fmean(extreme_of_k(r, k, best=False) for r in drawn)
        values.update(_votes(domain, members, config))
    if accuracies:
        values |= {"val/accuracy": fmean(accuracies), "val/reward": fmean(rewards)}
        if config.bootstrap:
            values["val/accuracy_spread"] = bootstrap_spread(accuracies, config.bootstrap)
    values["val/responses"] = float(sum(len(group.trajectories) for group in groups))
    return values


def _votes(domain: str, groups: Sequence[Group], config: ValidationConfig) -> dict[str, float]:
    """Return the majority votes of a domain: none if no response states an answer."""
    values: dict[str, float] = {}
    if config.maj_at_k and all(t.answer is None for group in groups for t in group.survivors):
        logger.warning("maj_at_k: no response of domain %s states an answer, so there is no vote", domain)
        return values
    for k in config.maj_at_k:
        of_tasks = []
        for group in groups:
            if len(group.survivors) >= k:
                right = [float(t.reward >= config.pass_threshold) for t in group.survivors]
                of_tasks.append(majority_of_k([t.answer for t in group.survivors], right, k, group.task.id))
        if of_tasks:
            values[f"val/{name_part(domain)}/maj_at_{k}"] = fmean(of_tasks)
            if config.bootstrap:
                spread = bootstrap_spread(of_tasks, config.bootstrap, domain, f"maj_at_{k}")
                values[f"val/{name_part(domain)}/maj_at_{k}_spread"] = spread
    return values


def episode_success(trajectory: Trajectory) -> float | None:
    """Return 1 or 0 as the last turn says, with several roles the mean of what their last turns say; None where none
    does. Of branches, any of which may have been played last, the last that says so."""
    outcomes = []
    for role in dict.fromkeys(turn.role for turn in trajectory.turns):
        own = [turn for turn in trajectory.turns if turn.role == role]
        last = own if any(turn.after is not None for turn in own) else own[-1:]
        outcomes += [turn.metrics["success"] for turn in reversed(last) if "success" in turn.metrics][:1]
    return fmean(outcomes) if outcomes else None


def successes(trajectories: Sequence[Trajectory]) -> list[float]:
    """Return 1 or 0 for every episode of one environment; empty where it doesn't say what success is.

    An environment that says it of some of the episodes that it ended means no for the others, and for those that were
    cut off. Where all were cut off, all are 0; but not those of a reward function, which has nothing to say (and counts
    nothing).
    """
    ended = [t for t in trajectories if t.status == "ok"]
    if ended:
        says = any(episode_success(t) is not None for t in ended)
    else:
        says = any(t.turns and t.turns[-1].metrics for t in trajectories)
    return [episode_success(t) or 0.0 for t in trajectories] if says else []


def validation_samples(groups: Sequence[Group], tokenizer: Any, count: int) -> list[Sample]:
    """Return an episode with a reward of each of the first `count` tasks, as text: first prompt, then all else. What is
    a role's has its name in front, in square brackets."""
    samples = []
    for group in groups[:count]:
        for trajectory in group.survivors[:1]:
            first = trajectory.turns[0]
            texts: list[str] = []
            for role, turns in itertools.groupby(trajectory.turns, key=lambda turn: turn.role):
                ids = [token for turn in turns for token in (*turn.prompt_ids, *turn.response_ids)]
                own = ids if texts else ids[len(first.prompt_ids) :]
                texts.append(f"\n[{role}] {tokenizer.decode(own)}" if texts else tokenizer.decode(own))
            named = f"[{first.role}] " if first.role else ""
            samples.append(
                Sample(
                    domain=group.task.domain,
                    prompt=named + tokenizer.decode(first.prompt_ids),
                    response="".join(texts),
                    reward=trajectory.reward,
                )
            )
    return samples
