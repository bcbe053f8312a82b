"""What the reward functions of verl and TRL are called with, and what they may write down.

Read in trl 1.16.0, `GRPOTrainer._calculate_rewards`, and in verl 0.9.1, `reward_loop/reward_manager/naive.py`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from roll.configs.catalog.signatures import STATE_ATTRIBUTES, Signature
from roll.rewards.base import Reward, RewardContractError, RewardRequest, RewardSpec, ground_truth
from roll.types.trajectory import Task

Outcome = Reward | Exception | None
"""What came of one response: its reward, what is wrong with it, or None: the function doesn't score this row."""

_NOT_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns that TRL doesn't hand over: `prompts` and its own take their place."""
_MAX_METRICS = 100


class TrainerState:
    """TRL's `trainer_state`, as far as it is known where rewards are computed."""

    def __init__(self, global_step: int, max_steps: int | None) -> None:
        self.global_step = global_step
        if max_steps is not None:
            self.max_steps = max_steps

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer_state.{name} isn't known to reward functions here: of the state they are told "
            f"{STATE_ATTRIBUTES[0]}, and {STATE_ATTRIBUTES[1]} where the configuration says it"
        )


class CallLog:
    """What a function of TRL's writes down during one call: `log_extra`, `log_metric`."""

    def __init__(self, function: str, count: int) -> None:
        self._function, self._count = function, count
        self._columns: dict[str, list[Any]] = {}
        self._metrics: dict[str, list[float]] = defaultdict(list)

    def extra(self, column: str, values: Iterable[Any]) -> None:
        """Note a column: one value per response."""
        listed = as_list(values, self._count, f"{self._function!r} called log_extra({column!r}) with")
        self._columns[str(column)] = listed

    def metric(self, name: str, value: float) -> None:
        """Note a number of this call."""
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"log_metric({name!r}, {number}): expected a finite number")
        if name not in self._metrics and len(self._metrics) >= _MAX_METRICS:
            raise ValueError(f"log_metric({name!r}, ...): a call has more than {_MAX_METRICS} metrics")
        self._metrics[str(name)].append(number)

    def add_to(self, outcomes: list[Outcome]) -> list[Outcome]:
        """Return the rewards with the columns in their explanations, and the metrics among their parts."""
        if not self._columns and not self._metrics:
            return outcomes
        metrics = {name: math.fsum(values) / len(values) for name, values in self._metrics.items()}
        return [self._with(outcome, row, metrics) for row, outcome in enumerate(outcomes)]

    def _with(self, outcome: Outcome, row: int, metrics: Mapping[str, float]) -> Outcome:
        if not isinstance(outcome, Reward):
            return outcome
        columns = "\n".join(f"{name}: {values[row]}" for name, values in self._columns.items())
        why = "\n".join(text for text in (outcome.explanation, columns) if text)
        return replace(outcome, parts={**metrics, **outcome.parts}, explanation=why)


def as_list(values: Any, count: int, what: str) -> list[Any]:
    """Return a function's list of one value per response; raises `RewardContractError` for anything else."""
    expected = f"for {count} responses, expected a list of {count}"
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise RewardContractError(f"reward function {what} {type(values).__name__} {expected}")
    has_length = hasattr(values, "__len__")
    try:
        listed = list(values) if has_length else list(islice(values, count + 1))  # a generator may be endless
    except TypeError:  # an array or a tensor without dimensions
        raise RewardContractError(f"reward function {what} a single {type(values).__name__} {expected}") from None
    if len(listed) != count:
        got = str(len(listed)) if has_length or len(listed) < count else f"more than {count}"
        raise RewardContractError(f"reward function {what} {got} {'value' if got == '1' else 'values'} {expected}")
    return listed


def trl_arguments(
    requests: Sequence[RewardRequest], takes: Signature, spec: RewardSpec, log: CallLog
) -> dict[str, Any]:
    """Return TRL's arguments, those that the function takes.

    Prompts and completions are messages where the prompt is messages, and texts where it is a text. Columns are all of
    the rows' but `prompt`, `completion` and `completion_ids`.
    """
    names = dict.fromkeys(name for request in requests for name in request.task.payload if name not in _NOT_COLUMNS)
    arguments: dict[str, Any] = {name: [one.task.payload.get(name) for one in requests] for name in names}
    if all(value is None for value in arguments.get("messages", ())):
        arguments.pop("messages", None)  # the prompts' place in a row of ours, and no column of the data
    arguments["prompts"] = [_prompt(request) for request in requests]
    arguments["completions"] = [_completion(request) for request in requests]
    if all(request.completion_ids is not None for request in requests):
        arguments["completion_ids"] = [list(request.completion_ids or ()) for request in requests]
    if requests[0].step is not None:
        arguments["trainer_state"] = TrainerState(requests[0].step, spec.max_steps)
    arguments |= {"log_extra": log.extra, "log_metric": log.metric}
    missing = sorted(takes.required - arguments.keys() - spec.kwargs.keys())
    if missing:
        row = requests[0].task
        raise RewardContractError(
            f"reward function {spec.name.rpartition(':')[2]!r} needs {', '.join(missing)}, and row {row.id!r} has no "
            f"such column; its columns: {', '.join(sorted(row.payload))}"
        )
    return {name: value for name, value in arguments.items() if takes.takes_any or name in takes.annotations}


def _messages(task: Task) -> list[dict[str, Any]] | None:
    """Return the prompt as messages, which a file's `prompt` may hold too; None: it is a text."""
    messages = task.payload.get("messages")
    if messages is None and isinstance(task.payload.get("prompt"), Sequence):
        prompt = task.payload["prompt"]
        messages = None if isinstance(prompt, str) else prompt
    if messages is None or not all(isinstance(message, Mapping) for message in messages):
        return None
    return [dict(message) for message in messages]


def _prompt(request: RewardRequest) -> Any:
    messages = _messages(request.task)
    return request.task.payload.get("prompt") or "" if messages is None else messages


def _completion(request: RewardRequest) -> Any:
    if _messages(request.task) is None:
        return request.response
    messages = request.messages or ({"role": "assistant", "content": request.response},)
    return [dict(message) for message in messages]


def verl_arguments(request: RewardRequest, names: Iterable[str]) -> dict[str, Any]:
    """Return verl's arguments of these names. `extra_info` is the row's, with what verl's manager adds."""
    payload = request.task.payload
    extra = payload.get("extra_info")
    if extra is None or isinstance(extra, Mapping):
        extra = {**(extra or {}), "num_turns": _num_turns(request), "rollout_reward_scores": {}}
    arguments: dict[str, Any] = {
        "data_source": payload.get("data_source", request.task.tag),
        "solution_str": request.response if request.completion_text is None else request.completion_text,
        "extra_info": extra,
    }
    if "ground_truth" in names:
        nested = payload.get("reward_model")
        has_own = payload.get("ground_truth") is not None
        truth = nested.get("ground_truth") if isinstance(nested, Mapping) and not has_own else None
        arguments["ground_truth"] = ground_truth(request.task) if truth is None else truth
    return {name: value for name, value in arguments.items() if name in names}


def _num_turns(request: RewardRequest) -> int:
    """Return verl's count of turns: the prompt, each response, and each round of answers between them."""
    roles = [message["role"] == "assistant" for message in request.messages] or [True]
    return 1 + sum(is_response or (i > 0 and roles[i - 1]) for i, is_response in enumerate(roles))
