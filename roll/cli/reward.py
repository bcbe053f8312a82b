"""`roll reward test`: does a reward give the reference answers of a data set full marks, and wrong ones not?"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.cli.command_parser import key_values
from roll.cli.exits import Exit
from roll.cli.reward_report import Kind, Mismatch, report
from roll.configs.catalog.entries import nearest
from roll.configs.catalog.reward_table import REWARDS
from roll.configs.schema.reward_config import WEIGHTED
from roll.configs.schema.worker_config import DataArgs
from roll.data.sources import GROUND_TRUTH_COLUMNS, VERL_TAG
from roll.data.templates import PromptEncoder
from roll.data.thought_spans import prompted
from roll.rewards.base import Reward, RewardRequest, RewardResult, RewardSpec
from roll.rewards.references import JUDGING, answer_text, filled, perturbed, reference_template
from roll.rewards.reward_pool import RewardPool
from roll.types.trajectory import Task
from roll.utils.readers import Row, read_rows, resolve_sources
from roll.utils.rows import column_value, has_column
from roll.utils.terminal import say

if TYPE_CHECKING:
    from roll.configs.schema.rlvr_config import RLVRConfig
    from roll.configs.schema.run_config import RunConfig

PROGRESS_S = 5.0
_AT_ONCE = 256
_THOUGHT = "So it is.\n</think>\n\n"
"""What responses begin with where the prompt has opened a thought."""
_REFERENCE, _EMPTY, _PERTURBED, _UNFINISHED = _KINDS = ("reference", "empty", "perturbed", "unfinished thought")
"""Responses that are tried."""
_ALONE = "reward"
"""Domain of all rows where no configuration names others."""


@dataclass(frozen=True)
class _Plan:
    """What scores which rows."""

    specs: Mapping[str, RewardSpec]
    """By domain."""
    columns: DataArgs
    default_tag: str | None
    config: RLVRConfig | None
    timeout_s: float
    encode: Callable[[str], Sequence[int]] | None = None
    """Gives the token ids of a response; None: the model that writes them isn't known, or not here."""
    encoder: PromptEncoder | None = None
    """Renders the prompts of a configuration, if its tokenizer is a folder here: a template may open thoughts."""

    def domain_of(self, tag: str | None, source: str) -> str | None:
        """Return the domain of a row, None if there is none."""
        return _ALONE if self.config is None else self.config.domain_of(tag or self.default_tag or source)


@dataclass(frozen=True)
class _Case:
    """One response of a row, and whether it should get full marks (None: it only has to be scored)."""

    where: str
    check: str
    right: bool | None
    request: RewardRequest


def test_reward(options: argparse.Namespace) -> int:
    """Print a table of the rows whose reference answer fails, or whose empty or wrong answer passes."""
    if options.limit is not None and options.limit < 1:
        raise ValueError(f"--limit: got {options.limit}, expected at least 1")
    if options.answer_template is not None and "{answer}" not in options.answer_template:
        raise ValueError("--answer_template: there is no {answer} in it, where the reference answer goes")
    plan = _plan(options)
    counts: Counter[str] = Counter()
    kinds = {name: Kind() for name in _KINDS}
    mismatches: list[Mismatch] = []
    rows = (row for source in resolve_sources(options.data) for row in _rows(source, options.limit))
    cases = _cases(itertools.islice(rows, options.limit), plan, options, counts, mismatches)
    begin = last = time.monotonic()
    scored = 0
    with contextlib.ExitStack() as stack:
        pools = {domain: stack.enter_context(_pool(domain, plan)) for domain in plan.specs}
        for pool in pools.values():
            pool.wait_ready()
        while batch := list(itertools.islice(cases, _AT_ONCE)):
            for case, result in zip(batch, _results(batch, pools), strict=True):
                if result.status == "unscored":
                    counts["responses that the function doesn't score (None)"] += 1
                    continue
                scored += 1
                score = None if result.reward is None else marks(result.reward, plan.specs[case.request.domain])
                problem = _problem(case, result, score, options.full_marks)
                kinds[case.check].add(case.request.response, score, as_expected=problem is None)
                if problem is not None:
                    mismatches.append(problem)
            if time.monotonic() - last >= PROGRESS_S:
                last = time.monotonic()
                say(f"{counts['rows']} rows, {len(mismatches)} responses not scored as expected, {last - begin:.0f} s")
    if not counts["rows"]:
        raise ValueError(f"{options.data}: no rows that a reward function scores")
    if not scored and not mismatches:
        raise ValueError(f"{options.data}: the reward function scores none of its rows: it returned None for all")
    report(f"{options.reward} on {options.data}", kinds, counts, mismatches, options.show)
    if advice := _lower_full_marks(mismatches, options.full_marks):
        sys.stdout.write(f"{advice}\n")
    return Exit.FAILED if mismatches else Exit.DONE


def _lower_full_marks(wrong: Sequence[Mismatch], full: float) -> str:
    """Return advice where references alone fail, and only for getting less than full marks."""
    short = [one.got for one in wrong if one.check == _REFERENCE and one.got is not None]
    if len(short) > 1 and len(short) == len(wrong) and min(short) > 0 and max(short) < full:
        return (
            f"all of them are reference answers with {min(short):g} to {max(short):g}: if that is what a right answer "
            f"gets from this reward, --full_marks {min(short):g} says so"
        )
    return ""


def _results(batch: Sequence[_Case], pools: Mapping[str, RewardPool]) -> list[RewardResult]:
    """Return what came of each case; those of a domain are queued at once."""
    futures: dict[int, Future[RewardResult]] = {}
    for domain, pool in pools.items():
        own = [number for number, case in enumerate(batch) if case.request.domain == domain]
        futures |= zip(own, pool.submit_all([batch[number].request for number in own]), strict=True)
    return [futures[number].result() for number in range(len(batch))]


def _pool(domain: str, plan: _Plan) -> RewardPool:
    """Return the processes of a domain, as a run has them: a function that takes lists is given lists."""
    processes = max(1, min(4, os.cpu_count() or 1))
    return RewardPool({domain: plan.specs[domain]}, num_processes=processes, timeout_s=plan.timeout_s, retries=0)


def _rows(source: Any, limit: int | None) -> Iterator[tuple[str, Row]]:
    yield from ((source.name, row) for row in itertools.islice(read_rows(source), limit))


def _plan(options: argparse.Namespace) -> _Plan:
    named = {role: getattr(options, role) for role in ("prompt", "messages", "ground_truth", "tag")}
    columns = {role: column for role, column in named.items() if column is not None}
    if _names_config(options.reward):
        return _plan_of_config(Path(options.reward), options.arguments, columns)
    if options.reward not in REWARDS and ":" not in options.reward:
        if options.reward.endswith(".py"):
            raise ValueError(f"{options.reward} names no function: write {options.reward}:<name of the function>")
        raise ValueError(
            f"there is no reward {options.reward!r}; {nearest(options.reward, REWARDS)}known: {', '.join(REWARDS)}; or "
            "path/to/file.py:function, or a configuration, name.yaml"
        )
    if options.reward == WEIGHTED:
        raise ValueError("weighted has its parts from a configuration: give the .yaml instead of the name")
    kwargs = key_values(options.arguments, "e.g. mode=flexible")
    spec = RewardSpec(name=options.reward, kwargs=kwargs, key="reward")
    return _Plan({_ALONE: spec}, DataArgs(**columns), None, None, timeout_s=30.0)


def _names_config(argument: str) -> bool:
    """Tell a configuration, whose .yaml may be left out as for other commands, from a reward."""
    if ":" in argument or argument in REWARDS or argument.endswith(".py"):
        return False
    return argument.endswith((".yaml", ".yml")) or os.sep in argument or Path(f"{argument}.yaml").is_file()


def _plan_of_config(file: Path, overrides: Sequence[str], columns: Mapping[str, Any]) -> _Plan:
    from roll.configs.parsing.find import find_config
    from roll.configs.schema.rlvr_config import RLVRConfig
    from roll.pipelines.rollouts.reward_router import in_run, reward_spec

    config = configuration(find_config(file), overrides)
    if not isinstance(config, RLVRConfig):
        raise ValueError(f"{file} is of pipeline {config.pipeline}; rewards belong to rlvr")
    functions = {name: reward for name, reward in config.rewards.items() if reward.is_function}
    if not functions:
        models = ", ".join(sorted({role for reward in config.rewards.values() for role in reward.models}))
        raise ValueError(f"{file}: every domain is scored by a model ({models}); there is no function to test")
    data = config.actor_train.data_args
    only = config.tags_of(next(iter(config.rewards)))[0] if len(config.rewards) == 1 else None
    specs = {domain: reward_spec(config, domain) for domain in functions}
    encode, encoder = _encoders(config)
    if all(name in REWARDS for spec in specs.values() for name in spec.functions):
        encode = None
    if encode is not None:
        specs = {domain: in_run(spec, config.max_steps) for domain, spec in specs.items()}
    return _Plan(
        specs,
        replace(data, **columns),
        data.default_tag or only,
        config,
        max(reward.timeout_s for reward in functions.values()),
        encode,
        encoder,
    )


def configuration(file: Path, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration, of which the model needn't be here. Raises `ValueError` with all that is wrong."""
    from roll.configs.errors import ConfigError
    from roll.configs.parsing.loader import read_config

    reading = read_config(file, overrides)
    for note in reading.notes:
        say(f"note: {note}")
    if reading.violations or reading.config is None or not reading.sound:
        raise ConfigError(reading.key_lines.added_to(reading.violations), str(file))
    return reading.config


def _encoders(config: RLVRConfig) -> tuple[Callable[[str], Sequence[int]], PromptEncoder] | tuple[None, None]:
    """Return what tokenises responses, for functions of the user's own that read tokens, and what renders prompts;
    nothing if there is no tokenizer here."""
    from roll.pipelines.rl.rlvr import prompt_encoder
    from roll.pipelines.workers.train_worker import resolved_model_args
    from roll.strategies.training.pretrained import load_tokenizer

    args = resolved_model_args(config, "actor_train")
    if not Path(str(args.model_name_or_path)).expanduser().is_dir():
        say(
            f"note: the model {args.model_name_or_path} isn't here as a folder: nothing is known of its chat template "
            "(whether it opens a thought), and responses have no tokens"
        )
        return None, None
    tokenizer = load_tokenizer(args)
    encoder = prompt_encoder(config, config.actor_train.data_args, tokenizer)
    return (lambda text: tuple(tokenizer.encode(text, add_special_tokens=False))), encoder


def _cases(
    rows: Iterator[tuple[str, Row]],
    plan: _Plan,
    options: argparse.Namespace,
    counts: Counter[str],
    mismatches: list[Mismatch],
) -> Iterator[_Case]:
    for source, row in rows:
        tag = row.values.get(plan.columns.tag or "tag")
        if tag is None and plan.columns.tag is None and plan.default_tag is None:
            tag = row.values.get(VERL_TAG)
        domain = plan.domain_of(None if tag is None else str(tag), source)
        if domain not in plan.specs:
            counts["of no function's domain"] += 1
            continue
        counts["rows"] += 1
        assert domain is not None
        task = prompted(_task(row, plan.columns, domain, str(tag or "")), plan.encoder)
        spec = judged(plan.specs[domain])[1]
        answer = row.values.get(options.answer) if options.answer else task.payload.get("ground_truth")
        if options.answer and options.answer not in row.values:
            raise ValueError(f"--answer: {row.where} has no column {options.answer!r}; columns: {sorted(row.values)}")
        responses: list[tuple[str, str, bool | None]] = [(_EMPTY, "", False)]
        if answer is None or answer == "":
            if spec.name in JUDGING and spec.name != "code":
                mismatches.append(Mismatch(row.where, _REFERENCE, "the row has no reference answer"))
                continue
            counts["without a reference answer"] += 1
        else:
            text = answer_text(spec.name, answer, spec.kwargs)
            template = options.answer_template or reference_template(spec.name, spec.kwargs)
            thought = _THOUGHT if task.opens_thought and options.answer_template is None else ""
            responses.append((_REFERENCE, thought + filled(template, text), True))
            responses.append((_PERTURBED, thought + filled(template, perturbed(spec.name, text)), False))
            if thought:
                responses.append((_UNFINISHED, filled(template, text), False))
        for check, response, right in responses:
            request = RewardRequest(id=row.where, domain=domain, response=response, task=task)
            if plan.encode is not None:
                request = replace(request, completion_ids=plan.encode(response), step=0)
            yield _Case(row.where, check, right, request)


def _task(row: Row, columns: DataArgs, domain: str, tag: str) -> Task:
    payload = dict(row.values)
    for role, named in (("prompt", columns.prompt), ("messages", columns.messages)):
        payload[role] = row.values.get(named or role)
    truths = (columns.ground_truth,) if columns.ground_truth else GROUND_TRUTH_COLUMNS
    if columns.ground_truth and not has_column(row.values, columns.ground_truth):
        there = f"columns: {sorted(row.values)}"
        raise ValueError(f"{row.where}: no column {columns.ground_truth!r} (named for ground_truth); {there}")
    candidates = (column_value(row.values, name) for name in truths if has_column(row.values, name))
    truth = next((value for value in candidates if value is not None), None)
    if truth is not None:
        payload["ground_truth"] = truth
    return Task(id=row.where, source=row.where, payload=payload, seed=0, tag=tag, domain=domain)


def judged(spec: RewardSpec) -> tuple[str, RewardSpec]:
    """Return what compares with the reference answer: of a weighted sum that part's name and function."""
    for part, (_, inner) in spec.parts.items():
        if inner.name in JUDGING:
            return part, inner
    return "", spec


def marks(reward: Reward, spec: RewardSpec) -> float:
    """Return how right a reward says that a response is, apart from bonuses for its form."""
    part, _ = judged(spec)
    if part:
        return reward.parts.get(f"{part}.correct", reward.parts.get(part, reward.value))
    return reward.parts.get("correct", reward.value)


def _problem(case: _Case, result: RewardResult, got: float | None, full: float) -> Mismatch | None:
    if got is None:
        last = [line.strip() for line in result.error.splitlines() if line.strip()]
        return Mismatch(case.where, case.check, f"{result.status}: {last[-1] if last else ''}", failed=True)
    shown = f"{got:g} for {case.request.response[-120:]!r}"
    if case.right is True and got < full:
        return Mismatch(case.where, case.check, f"{shown}, expected {full:g}", got=got)
    if case.right is False and got >= full:
        return Mismatch(case.where, case.check, f"{shown}, expected less than {full:g}", got=got)
    return None
