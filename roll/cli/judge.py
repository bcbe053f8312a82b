"""`roll judge agree`: the judge of a configuration against labels that people gave."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Iterator
from typing import Any

from roll.cli.exits import Exit
from roll.configs.parsing.find import find_config
from roll.configs.parsing.loader import load_config
from roll.configs.schema.judge_config import JUDGE
from roll.configs.schema.reward_config import RewardConfig
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.rewards.base import RewardRequest
from roll.rewards.judge_score import agreement
from roll.types.trajectory import Task
from roll.utils.readers import read_rows, resolve_sources
from roll.utils.terminal import say

_SHOWN = 5


def agree(options: argparse.Namespace) -> int:
    """Grade every row of a file and compare."""
    file = find_config(options.file)
    config = load_config(file.parent, file.stem, options.overrides)
    if not isinstance(config, RLVRConfig) or config.judge is None:
        raise ValueError(f"{file} has no section judge; add one, see docs/rewards.md")
    rows = list(_rows(options))
    labels = [label for _, label in rows]
    from roll.pipelines.workers.judge_worker import JudgeClient

    judge_config = config.judge
    rewards = {"labels": _reward(config, options.domain)}
    scores: list[float] = []
    human: list[float] = []
    failed: list[str] = []
    with contextlib.ExitStack() as stack:
        judge = stack.enter_context(JudgeClient(judge_config, _backend(config, stack), rewards))
        # All at once: the judge limits what is in flight.
        futures = [judge.submit(request) for request, _ in rows]
        for (request, label), future in zip(rows, futures, strict=True):
            result = future.result()
            if result.reward is None:
                failed.append(f"row {request.id}: {result.error}")
            else:
                scores.append(result.reward.value)
                human.append(label)
        counted = judge.take_metrics().result()
    for text in failed[:_SHOWN]:
        say(f"no score: {text}")
    if not scores:
        raise ValueError(f"{options.data}: none of its {len(rows)} rows got a score from the judge, see above")
    low, high = judge_config.score_min, judge_config.score_max
    kwargs = rewards["labels"].reward_kwargs
    low, high = kwargs.get("score_min", low), kwargs.get("score_max", high)
    # 0 and 1 mean wrong and right whatever the judge's scale is; other labels are on that scale.
    on_unit = set(labels) <= {0.0, 1.0}
    normalized = kwargs.get("normalize", judge_config.normalize)
    if on_unit and not normalized:
        scores = [(score - low) / (high - low) for score in scores]
    elif not on_unit and normalized:
        scores = [low + score * (high - low) for score in scores]
    agreed = agreement(scores, human)
    figures = {
        "rows with a score": agreed.rows,
        "rows without": len(failed),
        "accuracy": agreed.accuracy,
        "Cohen's kappa": agreed.kappa,
        "Pearson correlation": agreed.pearson,
        "Spearman correlation": agreed.spearman,
        "score less label": agreed.mean_difference,
        "prompt tokens": int(counted.get("judge/prompt_tokens", 0)),
        "answer tokens": int(counted.get("judge/completion_tokens", 0)),
        "cost": counted.get("judge/cost", 0.0),
    }
    for name, value in figures.items():
        shown = "undefined" if math.isnan(value) else f"{value}" if isinstance(value, int) else f"{value:.4f}"
        sys.stdout.write(f"{name:<22}{shown}\n")
    return Exit.DONE


def _rows(options: argparse.Namespace) -> Iterator[tuple[RewardRequest, float]]:
    number = 0
    for source in resolve_sources(options.data):
        for row in read_rows(source):
            number += 1
            values: dict[str, Any] = dict(row.values)
            for key in (options.response, options.label):
                if values.get(key) is None:
                    known = ", ".join(values)
                    raise ValueError(f"{options.data}, row {number}: no column {key!r}; it has {known}")
            try:
                label = float(values[options.label])
                if not math.isfinite(label):
                    raise ValueError
            except (TypeError, ValueError):
                raise ValueError(
                    f"{options.data}, row {number}: {options.label} is {values[options.label]!r}, expected a number"
                ) from None
            values.setdefault("prompt", values.get(options.prompt))
            task = Task(id=str(number), source="", payload=values, seed=0, tag="labels", domain="labels")
            yield (
                RewardRequest(id=str(number), domain="labels", response=str(values[options.response]), task=task),
                label,
            )
    if not number:
        raise ValueError(f"{options.data}: no rows")


def _reward(config: RLVRConfig, domain: str | None) -> RewardConfig:
    """Return the domain whose rubric counts; without one, that of the section."""
    if domain is None:
        return RewardConfig(name=JUDGE)
    if domain not in config.rewards:
        raise ValueError(f"--domain: no domain {domain!r}; there are {', '.join(config.rewards)}")
    return config.rewards[domain]


def _backend(config: RLVRConfig, stack: contextlib.ExitStack) -> Any:
    assert config.judge is not None
    if config.judge.endpoint is not None:
        from roll.pipelines.workers.judge_endpoint import EndpointJudge

        return EndpointJudge(config.judge)
    from roll.distributed.inline import InlineExecutor
    from roll.distributed.placement import RolePlacement
    from roll.pipelines.workers.judge_engine import EngineJudge, JudgeWorker

    placement = RolePlacement(role=JUDGE, ranks=((0,),))
    executor = stack.enter_context(InlineExecutor([placement], rpc_timeout=config.rpc_timeout))
    return EngineJudge(executor.create_cluster(placement, JudgeWorker, (config,)), config)
