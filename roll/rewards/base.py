"""What a reward function takes and returns. Read this file to write one.

A reward function is `fn(response: str, task: Task, **reward_kwargs) -> Reward | float`, plain or `async`. It raises
when the *task* is broken or a service it needs is down: that becomes a status, is retried and counted. A broken
*response* is the policy's doing and gets a low reward. A function with a parameter called `finish_reason` is
also told how the response ended. One with a parameter called `sandbox` is given the run's opened `Sandbox`
(`roll/isolation/sandbox/base.py`), the only place where model output may be executed.

Other signatures are called as they were written for (`roll/configs/catalog/signatures.py`, `reward_calls.py`):
`fn(responses, tasks)` with lists, verl's `compute_score(data_source, solution_str, ground_truth, extra_info=None)`,
which may return a dict with a `score`, and TRL's `fn(prompts, completions, **columns)`, with lists, which may return
None for rows that aren't its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, Protocol, TypeAlias

from roll.types.trajectory import FinishReason, Task


@dataclass(frozen=True, slots=True)
class Reward:
    """One response's score. `parts` are the unweighted terms, logged under their own names."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None
    """What the response states as its answer, for majority votes (`validation.maj_at_k`): equal texts are one answer.
    None: it states none, or nobody has looked."""
    explanation: str = ""
    """Why it has this value, for people: a judge's words, what a test printed. `roll view` shows it."""


RewardFn: TypeAlias = Callable[..., Any]  # (response, task, **reward_kwargs) -> score

ResultStatus = Literal["ok", "unscored", "error", "timeout"]
"""`unscored`: the function says that this row isn't one of its own (None, from a function of TRL's kind)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """Which function scores a domain, and with which keyword arguments."""

    name: str
    """A name of `catalog.rewards.REWARDS`, or `package.module:function` or `path/to/file.py:function`."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Passed to every call (`reward_kwargs`); a name that the function doesn't take is refused when it is
    loaded.
    """
    key: str = "reward"
    """The configuration's key that names it, for error messages."""
    parts: Mapping[str, tuple[float, RewardSpec]] = field(default_factory=dict)
    """Of `weighted`: weight and function by the part's name."""
    environment: tuple[str, ...] = ()
    """Environment variables that its processes see besides the usual ones."""
    concurrency: int = 16
    """Responses that one process scores at once, with an async function (awaited side by side) or one that takes
    lists (in one call)."""
    sandbox: str = "auto"
    """What a function with a parameter `sandbox` runs programs in: the configuration's key of that name."""
    in_run: bool = False
    """Requests come from episodes of a run: they say which tokens were sampled, and in which step."""
    max_steps: int | None = None
    """Steps of that run; None: nobody knows."""

    @property
    def functions(self) -> tuple[str, ...]:
        """Return its name, and those of its parts."""
        return (self.name, *(name for _, part in self.parts.values() for name in part.functions))


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRequest:
    """One response to score."""

    id: str
    domain: str
    response: str
    task: Task
    finish_reason: FinishReason = "stop"
    completion_ids: Sequence[int] | None = None
    """Tokens after the prompt, in an episode of several turns what tools and users said included. None: there are only
    texts."""
    completion_text: str | None = None
    """Their text, in an episode of several turns. None: `response`."""
    messages: Sequence[Mapping[str, Any]] = ()
    """What was said after the prompt, `response` last, in an episode of several turns. Empty: `response` alone."""
    step: int | None = None
    """Steps that the run had trained when the episode began. None: there is no run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """What came of a request. Only `ok` says something about the policy; the others have no reward."""

    id: str
    status: ResultStatus
    reward: Reward | None
    error: str = ""  # For people: the exception, how the process ended, or who doesn't score it; empty when `ok`
    attempts: int = 1
    seconds: float = 0.0  # Wall time over all attempts


class Scorer(Protocol):
    """Scores responses: a pool of reward processes, a reward model, or the judge."""

    def submit(self, request: RewardRequest) -> Future[RewardResult]:
        """Queue one response."""


_LARGEST = 1e12
_MAX_PARTS = 1000
_LONGEST_ANSWER = 10_000


class RewardLoadError(ValueError):
    """A reward function that can't be found, imported or called as configured."""


class RewardOutputError(ValueError):
    """A reward function returned something other than a finite number or a `Reward` of finite numbers."""


class RewardContractError(RewardOutputError):
    """A reward function doesn't keep to how it is called, whatever the responses: a list of the wrong length, a column
    that its rows don't have. Another try, or a call for each response, would hide it."""


def refused_options(name: str, function: RewardFn, kwargs: Mapping[str, Any]) -> str:
    """Return why a bundled reward function scores no response at all with these `reward_kwargs`, or nothing.

    Such functions look at their options first, and their messages about those begin with their name.
    """
    try:
        function("", Task(id="trial", source="", payload={}, seed=0, tag="", domain=""), **kwargs)
    except ValueError as error:
        text = str(error)
        return text if text.startswith(f"{name}: ") else ""  # others are about the row, and this has none
    except TypeError as error:
        return f"{name}: {error}"
    return ""


def ground_truth(task: Task) -> Any:
    """Return the expected answer of a task; raises `ValueError` when its row has none."""
    truth = task.payload.get("ground_truth")
    if truth is None:
        raise ValueError(
            f"task {task.id!r} has no ground truth; its columns are {sorted(task.payload)}: "
            "name the column that holds the answer in data_args"
        )
    return truth


def _plain(value: object) -> object:
    """Return the number in an array or a tensor of one element; anything else is itself."""
    if isinstance(value, (Real, str)) or not hasattr(value, "item") or getattr(value, "size", 1) == 0:
        return value
    try:
        return value.item()
    except (TypeError, ValueError, RuntimeError):  # of more elements, or another kind of `item`
        return value


def _finite(value: object, what: str, function: str) -> float:
    value = _plain(value)
    if not isinstance(value, Real):
        raise RewardOutputError(
            f"reward function {function!r} returned {what} of type {type(value).__name__}, expected a float"
        )
    number = float(value)
    if not math.isfinite(number):
        raise RewardOutputError(f"reward function {function!r} returned {what} = {number}, expected a finite number")
    if abs(number) > _LARGEST:
        raise RewardOutputError(
            f"reward function {function!r} returned {what} = {number:g}, expected at most {_LARGEST:g} in size: "
            "squares of it must be numbers, too"
        )
    return number


def as_reward(output: object, function: str, row: str = "") -> Reward:
    """Return what `function` returned, checked; a plain number becomes a `Reward` without parts, and a dict its `score`
    with the other numbers as parts. `row` is the task's, for the message."""
    try:
        return _as_reward(output, function)
    except RewardOutputError as error:
        raise RewardOutputError(f"{error} (row {row!r})" if row else str(error)) from None


def _as_reward(output: object, function: str) -> Reward:
    if isinstance(output, Mapping):
        if "score" not in output:
            raise RewardOutputError(
                f"reward function {function!r} returned a dict with {sorted(map(str, output))}, "
                "expected a 'score' in it"
            )
        items = [(str(name), _plain(value)) for name, value in output.items() if name != "score"]
        numbers = {name: float(value) for name, value in items if isinstance(value, Real)}
        stated = output.get("pred")  # where verl's rewards have it
        why = output.get("explanation")
        why = why if isinstance(why, str) else ""
        output = Reward(output["score"], numbers, None if stated is None else str(stated), why)
    if not isinstance(output, Reward):
        return Reward(_finite(output, "a value", function), {})
    if not isinstance(output.parts, Mapping):
        raise RewardOutputError(
            f"reward function {function!r} returned parts of type {type(output.parts).__name__}, expected a dict"
        )
    if len(output.parts) > _MAX_PARTS:
        raise RewardOutputError(
            f"reward function {function!r} returned {len(output.parts)} parts, expected at most {_MAX_PARTS}: "
            "each is a metric"
        )
    bad = [name for name in output.parts if not isinstance(name, str) or not name or not _is_text(name)]
    if bad:
        raise RewardOutputError(
            f"reward function {function!r} returned part names {bad[:10]!r}, expected strings that aren't empty"
        )
    parts = {name: _finite(part, f"part {name!r}", function) for name, part in output.parts.items()}
    if not (output.answer is None or isinstance(output.answer, str)):
        raise RewardOutputError(
            f"reward function {function!r} returned an answer of type {type(output.answer).__name__}, expected a text"
        )
    if not isinstance(output.explanation, str):
        kind = type(output.explanation).__name__
        raise RewardOutputError(f"reward function {function!r} returned an explanation of type {kind}, expected a text")
    stated = None if output.answer is None else output.answer[:_LONGEST_ANSWER]
    return Reward(_finite(output.value, "a value", function), parts, stated, output.explanation[:_LONGEST_ANSWER])


def explained(by: Mapping[str, str]) -> str:
    """Return explanations as one text, each after the name of what gave it; empty ones are left out."""
    return "\n\n".join(f"{name}: {text}" for name, text in by.items() if text)


def _is_text(name: str) -> bool:
    """Return False for what no file takes (half of a pair of surrogates), and for a whole document."""
    try:
        return len(name.encode()) <= 1000
    except UnicodeEncodeError:
        return False
