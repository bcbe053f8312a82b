"""What is wrong with a run, in words: looks at each step's metrics and says so once, with what to do about it.

A symptom must hold for some steps before it is told, so that the noise of one small batch isn't taken for a trend.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from statistics import median

Row = Mapping[str, float]

_FEW_TOKENS = 100
"""Statistics of fewer tokens are noise."""
_STEPS_OF_START = 5
"""The first steps, which later ones are compared with."""
_OF_START: Mapping[str, Callable[[list[float]], float]] = {"actor/entropy": max}
"""What of the first steps' values counts, if not their median: a policy may have collapsed within them."""


def _has_teacher(row: Row) -> bool:
    """Return whether something else than rewards is learnt from."""
    return "distill/reverse_kl" in row or "distill/divergence" in row


@dataclass(frozen=True, slots=True)
class Symptom:
    """One way in which a run is ill."""

    name: str
    """For the closing summary's count."""
    steps: int
    """Steps in a row that must have it."""
    shows: Callable[[Row, Mapping[str, float]], bool]
    """Whether a step has it: of its metrics, and of what they were in the run's first steps (`_start`)."""
    says: str
    """Problem and remedy, with `{metric}` for numbers."""
    enough: int = 0
    """Tokens in the loss that the step must have for the metric to mean something."""


def _at(row: Row, name: str, otherwise: float) -> float:
    return row.get(name, otherwise)


SYMPTOMS = (
    Symptom(
        "all responses cut",
        2,
        lambda row, _: _at(row, "response/truncated_share", 0.0) >= 0.999,
        "every response was cut off at the length limit, so none can be right where its end is read; raise "
        "response_length, or check that the model ends its turns (stop tokens, chat template)",
    ),
    Symptom(
        "most responses cut",
        5,
        lambda row, _: 0.5 <= _at(row, "response/truncated_share", 0.0) < 0.999,
        "{response/truncated_share:.0%} of the responses were cut off at the length limit; raise response_length",
    ),
    Symptom(
        "no signal",
        3,
        lambda row, _: _at(row, "group/zero_signal_share", 0.0) >= 0.999 and not _has_teacher(row),
        "in no group do the rewards differ (their mean is {reward/mean:.3g}), so nothing can be learnt; the tasks are "
        "too hard or too easy, the reward can't read the answers, or the samples don't vary (temperature)",
    ),
    Symptom(
        "episodes fail",
        2,
        lambda row, _: _at(row, "rollout/failed_episodes", 0.0) > _at(row, "rollout/responses", 0.0),
        "more episodes failed ({rollout/failed_episodes:.0f}) than were trained on ({rollout/responses:.0f}); the "
        "reasons are in dropped.jsonl",
    ),
    Symptom(
        "KL runs away",
        2,
        lambda row, start: _at(row, "kl/reference", 0.0) > max(1.0, 10 * start.get("kl/reference", 0.0)),
        "the KL to the reference is {kl/reference:.3g} nats a token and rising; lower the learning rate, or raise the "
        "KL coefficient",
        enough=_FEW_TOKENS,
    ),
    Symptom(
        "update too large",
        2,
        lambda row, _: abs(_at(row, "actor/ppo_kl", 0.0)) > 0.5 or not 0.5 <= _at(row, "actor/ratio_mean", 1.0) <= 2.0,
        "one step moves the policy far (ratio new to old {actor/ratio_mean:.3g} on average); lower the learning rate, "
        "or take fewer optimizer steps per batch",
        enough=_FEW_TOKENS,
    ),
    Symptom(
        "entropy collapses",
        3,
        lambda row, start: (
            start.get("actor/entropy", 0.0) > 0.05
            and _at(row, "actor/entropy", 1.0) < min(0.05, 0.1 * start["actor/entropy"])
        ),
        "the entropy has fallen to {actor/entropy:.3g} nats a token, so the responses of a group hardly differ; lower "
        "the learning rate, add an entropy term (entropy_loss_coef), or raise the upper clip (pg_clip_high)",
        enough=_FEW_TOKENS,
    ),
    Symptom(
        "learning rate 0",
        2,
        lambda row, _: _at(row, "actor/lr", 1.0) == 0.0,
        "the learning rate is 0, so nothing is learnt; check learning_rate, warmup_steps and lr_scheduler_type",
    ),
    Symptom(
        "no gradient",
        3,
        lambda row, _: _at(row, "actor/grad_norm", 1.0) == 0.0 and _at(row, "group/zero_signal_share", 0.0) < 0.999,
        "the gradient is 0 although rewards differ; are all parameters frozen, or all tokens masked?",
    ),
    Symptom(
        "steps skipped",
        2,
        lambda row, _: _at(row, "actor/skipped_steps", 0.0) >= max(1.0, _at(row, "actor/optimizer_steps", 0.0)),
        "optimizer steps are left out because their gradient isn't finite; lower the learning rate, or train in "
        "another precision",
    ),
    Symptom(
        "mismatch grows",
        3,
        lambda row, start: _at(row, "mismatch/kl", 0.0) > max(0.02, 5 * start.get("mismatch/kl", 0.0)),
        "the engine's probabilities and the trainer's drift apart (KL {mismatch/kl:.3g} nats a token, same weights); "
        "use one precision for both, or correct for it (importance weights)",
        enough=_FEW_TOKENS,
    ),
    Symptom(
        "rewards too hard to check",
        2,
        lambda row, _: (
            sum(value for name, value in row.items() if name.endswith("/too_hard"))
            > 0.2 * _at(row, "rollout/responses", float("inf"))
        ),
        "more than a fifth of the answers are too large or too deeply nested to be checked, and count as wrong",
    ),
)


OF_LENGTH = ("all responses cut", "most responses cut")
"""Symptoms that say nothing where a response is one token by its definition."""


class Health:
    """Looks at one step after the other."""

    def __init__(self, *, without: Collection[str] = ()) -> None:
        """Look for all symptoms but those named in `without`, which are none in this run."""
        self._symptoms = tuple(symptom for symptom in SYMPTOMS if symptom.name not in without)
        self._running: Counter[str] = Counter()
        self._reported: dict[str, tuple[int, str]] = {}
        self._first: deque[Row] = deque()

    def look(self, step: int, row: Row) -> list[str]:
        """Take a step's metrics; return what is to be said now: each symptom once, when it has lasted."""
        if "rollout/responses" not in row and "actor/loss" not in row:
            return []  # a row of validation alone
        start = self._start()
        messages = []
        for symptom in self._symptoms:
            counts = _at(row, "actor/loss_tokens", float("inf")) >= symptom.enough
            self._running[symptom.name] = self._running[symptom.name] + 1 if counts and symptom.shows(row, start) else 0
            if self._running[symptom.name] >= symptom.steps and symptom.name not in self._reported:
                words = symptom.says.format_map(_Numbers(row))
                self._reported[symptom.name] = (step, words)
                lasted = f"for {symptom.steps} steps " if symptom.steps > 1 else ""
                messages.append(f"step {step}: {lasted}{words}")
        if len(self._first) < _STEPS_OF_START:
            self._first.append(dict(row))
        return messages

    def messages(self) -> list[str]:
        """Return the messages of the whole run, for its closing summary."""
        return [f"from step {step}: {words}" for step, words in self._reported.values()]

    def _start(self) -> dict[str, float]:
        """Return what the metrics were in the first steps, their median as a rule."""
        names = {name for row in self._first for name in row}
        values = {name: [row[name] for row in self._first if name in row] for name in names}
        return {name: _OF_START.get(name, median)(values[name]) for name in names}


class _Numbers(dict[str, float]):
    """A row's metrics by name; one that isn't there is NaN."""

    def __missing__(self, name: str) -> float:
        return float("nan")
