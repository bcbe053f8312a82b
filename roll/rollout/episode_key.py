"""What an episode is played with: its name, its environment, and what it tells that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from roll.envs.base import Observation, StepResult
from roll.types.trajectory import FinishReason, Task
from roll.utils.seeding import stable_hash


@dataclass(frozen=True, slots=True)
class Action:
    """What the policy did: the text of its response, and why it ended."""

    text: str
    finish_reason: FinishReason
    opens_thought: bool = False
    """Whether the prompt had begun the thought that the text goes on with."""
    completion_ids: Callable[[], Sequence[int] | None] = lambda: None
    """Gives the tokens after the context's first prompt, up to this response."""
    completion_text: Callable[[], str] = lambda: ""
    """Gives their text, without special tokens."""
    messages: Sequence[Mapping[str, Any]] = ()
    """What was said after the prompt, this response included, where that is more than it."""
    step: int | None = None
    """Steps that were trained when the episode began."""


class EpisodeEnv(Protocol):
    """An environment as the player sees it: asynchronous, one instance per episode."""

    waits_for: str  # What `step` waits for, in error messages: `reward`, `environment`

    async def reset(self, task: Task) -> Observation:
        """Begin."""

    async def step(self, action: Action) -> StepResult:
        """Apply a response. Raises `EpisodeError` for a failure that isn't the policy's."""

    async def close(self) -> None:
        """Release resources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeKey:
    """Names an episode; with the turn it is the key of every random draw in it."""

    seed: int
    purpose: str  # `train`, `val` or `greedy`: the same task sampled for another purpose draws other numbers
    step: int
    position: int  # Place of the task in the step's plan
    member: int

    @property
    def trained_steps(self) -> int:
        """Return how many steps were trained when the episode began; of a validation, up to the step before it."""
        return max(0, self.step - (self.purpose != "val"))

    def name(self, task: Task) -> str:
        """Return the unique name of the episode within a run."""
        return f"{self.group_name(task)}#{self.member}"

    def group_name(self, task: Task) -> str:
        """Return the name that the episodes of one group share."""
        return f"{self.purpose}/{self.step}/{task.id}"

    def request_seed(self, task: Task, turn: int, salt: int | None = None) -> int:
        """Return the 128-bit key of one response."""
        salts = () if salt is None else (salt,)
        return stable_hash(self.seed, "sample", self.purpose, self.step, task.id, self.member, turn, *salts, bits=128)


def state_of(observation: Observation) -> str:
    """Return a short name for what is shown."""
    shown = observation.state or observation.text
    return f"{stable_hash('state', shown):016x}" if shown else ""


def add_up(sums: dict[str, float], values: Mapping[str, float]) -> dict[str, float]:
    """Add values to sums of the same names; returns the sums."""
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + value
    return sums


def numbers_of(
    reward: float, parts: Mapping[str, float] | None, role_rewards: Mapping[str, float] | None
) -> list[tuple[str, float]]:
    """Return every number of a score with its name."""
    return [("reward", reward), *(parts or {}).items(), *(role_rewards or {}).items()]
