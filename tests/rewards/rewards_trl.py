"""Reward functions as TRL's and verl's users write them, for the tests of their contracts."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from typing import Any


def near_twenty(completions, **kwargs):  # type: ignore[no-untyped-def]
    """For completions that are texts."""
    lengths = [len(completion) for completion in completions]
    return [float(min(length, 40 - length) - 20) for length in lengths]


def echo(prompts, completions, **kwargs):  # type: ignore[no-untyped-def]
    """Raise what it was given, to be looked at."""
    raise RuntimeError(repr({"prompts": prompts, "completions": completions, "columns": sorted(kwargs)}))


def everything(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, level, **kwargs):  # type: ignore[no-untyped-def]
    log_extra("shouted", [str(c).upper() for c in completions])
    log_metric("half_done", trainer_state.global_step / trainer_state.max_steps)
    log_metric("half_done", trainer_state.global_step / trainer_state.max_steps + 0.5)
    return [len(ids) + n for ids, n in zip(completion_ids, level, strict=True)]


def not_sevens(completions, answer, **kwargs):  # type: ignore[no-untyped-def]
    """None: not meant for this row."""
    return [None if a == "7" else float(a in c) for a, c in zip(answer, completions, strict=True)]


def only_sevens(completions, answer, **kwargs):  # type: ignore[no-untyped-def]
    return [10.0 if a == "7" else None for a in answer]


async def not_sevens_async(completions, answer, **kwargs):  # type: ignore[no-untyped-def]
    await asyncio.sleep(0)
    return not_sevens(completions, answer)


def one_for_all(completions, **kwargs):  # type: ignore[no-untyped-def]
    return [1.0]


def a_number(completions, **kwargs):  # type: ignore[no-untyped-def]
    return 1.0


def endless(completions, **kwargs) -> Iterator[float]:  # type: ignore[no-untyped-def]
    while True:
        yield 1.0


def generated(completions, **kwargs) -> Iterator[float]:  # type: ignore[no-untyped-def]
    return (float(len(c)) for c in completions)


def an_array(completions, **kwargs):  # type: ignore[no-untyped-def]
    import numpy as np

    return np.array([len(c) for c in completions], np.float32)


def booleans(completions, **kwargs):  # type: ignore[no-untyped-def]
    import numpy as np

    return [np.bool_(len(c) > 1) if i else True for i, c in enumerate(completions)]


def one_is_not_a_number(completions, **kwargs):  # type: ignore[no-untyped-def]
    return [float("nan") if c == "bad" else float(len(completions)) for c in completions]


def wrong_extra(completions, log_extra, **kwargs):  # type: ignore[no-untyped-def]
    log_extra("gold", ["only one"])
    return [1.0] * len(completions)


def needs_columns(prompts, completions, first_draft, *, marks, **kwargs):  # type: ignore[no-untyped-def]
    return [1.0] * len(completions)


def in_an_environment(completions, environments):  # type: ignore[no-untyped-def]
    return [1.0] * len(completions)


def asks_for_the_epoch(completions, trainer_state, **kwargs):  # type: ignore[no-untyped-def]
    return [trainer_state.epoch] * len(completions)


def asks_in_a_roundabout_way(completions, **kwargs):  # type: ignore[no-untyped-def]
    state = kwargs["trainer_state"]
    return [state.best_metric] * len(completions)


def by_position(completions, level, /):  # type: ignore[no-untyped-def]
    return [1.0] * len(completions)


def keywords_alone(**kwargs):  # type: ignore[no-untyped-def]
    return [1.0]


class Short:
    """Called like TRL's own factories' results: by its token ids alone."""

    def __init__(self, most: int) -> None:
        self.most = most

    def __call__(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [float(len(ids) <= self.most) for ids in completion_ids]


class Waiting:
    async def __call__(self, completions, **kwargs):  # type: ignore[no-untyped-def]
        await asyncio.sleep(0)
        return [float(len(c)) for c in completions]


def make_short(most: int) -> Callable[..., list[float]]:
    return Short(most)


def scaled(completions, factor, level, **kwargs):  # type: ignore[no-untyped-def]
    return [factor * n for n in level]


short = Short(3)
short_made = make_short(3)
waiting = Waiting()
waiting_partial = functools.partial(Waiting())
twice = functools.partial(scaled, factor=2)
alias = needs_columns
needs_bound = functools.partial(needs_columns, marks=1)


def verl_turns(data_source, solution_str, ground_truth, extra_info):  # type: ignore[no-untyped-def]
    """What verl's manager adds to `extra_info`; beyond the row's `index`."""
    return {
        "score": float(extra_info["num_turns"]),
        "scores_before": len(extra_info["rollout_reward_scores"]),
        "index": extra_info.get("index", -1),
    }


def verl_keywords(**kwargs):  # type: ignore[no-untyped-def]
    return 1.0


def verl_without_truth(solution_str, extra_info=None):  # type: ignore[no-untyped-def]
    return len(solution_str)


def verl_named_only(*, solution_str, ground_truth, **kwargs):  # type: ignore[no-untyped-def]
    return solution_str == ground_truth


def verl_lists(data_sources, solution_strs, ground_truths, extra_infos):  # type: ignore[no-untyped-def]
    together = len(solution_strs)
    return [{"score": float(s == t), "together": together} for s, t in zip(solution_strs, ground_truths, strict=True)]


async def verl_async(data_source, solution_str, ground_truth, extra_info=None):  # type: ignore[no-untyped-def]
    await asyncio.sleep(0)
    return float(solution_str == ground_truth)


def verl_router(data_source, solution_str, ground_truth, extra_info, reward_router_address):  # type: ignore[no-untyped-def]
    return 1.0
