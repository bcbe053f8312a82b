"""The environment interface: gymnasium's `reset` and `step`, with text for observations and actions."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.types.chat import Message as Message


class InvalidAction(ValueError):
    """The environment doesn't know the action, or it can't be done. The state is as before; the message says why."""


class ResetNeeded(RuntimeError):
    """`step` without an episode: before the first `reset`, or after the last step."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What the agent is shown: the messages that are new since its last action."""

    messages: tuple[Message, ...]
    state: str = ""
    """Names the state: equal texts are equal states (GiGPO compares the turns that met the same). Empty: what is shown
    says it all."""
    role: str = ""
    """Who is shown it and acts next: one of `Env.roles`. Empty in an environment of a single agent."""

    @classmethod
    def of(cls, text: str, state: str = "", role: str = "") -> Observation:
        """Return an observation of one user message."""
        return cls((Message("user", text),), state, role)

    @property
    def text(self) -> str:
        """Return the messages' contents, one below the other."""
        return "\n".join(message.content for message in self.messages)


@dataclass(slots=True, kw_only=True)
class StepResult:
    """What an action led to.

    Not frozen, though nobody changes one: two are made of every step, and a frozen one takes over twice as long.
    """

    reward: float
    """In an environment of several roles: what all of them get alike, 0 in a zero-sum game."""
    terminated: bool
    """The task is over: solved, failed, or answered."""
    truncated: bool = False
    """We stopped it: a time limit. Its value is not 0."""
    observation: Observation | None = None
    """None when the episode is over."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Named terms of the reward, for logging."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers for logging. `success` (1 or 0) in the last step of an episode is what validation calls success. With
    several roles `success/<role>` says it of each, and validation counts those that the policy plays."""
    role_rewards: Mapping[str, float] = field(default_factory=dict)
    """What each role gets, whoever acted; a role that isn't named gets 0. Only in an environment of several roles."""
    answer: str | None = None
    """What the episode states as its answer, where a reward function says so: for majority votes of validation."""
    explanation: str = ""
    """Why the reward is what it is, for people."""


class Env(ABC):
    """One environment instance; plays one episode at a time.

    An environment of several agents names its `roles` and says in every observation whose turn it is
    (`Observation.role`). That role is shown what is new since its own last action, and `step` gets its action. What a
    step is worth to each is `StepResult.role_rewards`. Roles take turns in any order, and none need ever act.
    """

    instructions: str = ""  # What the policy is told about the game before it begins
    actions: tuple[str, ...] = ()  # The actions there are. Empty: any text is one.
    roles: tuple[str, ...] = ()  # The roles there are, at least two. Empty: a single agent.
    one_episode: bool = False
    """Whether all seeds may play the same episode: a fixed start, and nothing is drawn. `roll envs test` takes it for a
    mistake otherwise."""
    reads_responses: bool = False
    """Whether it finds the action in a text itself: then it gets a response as it is if `action_pattern` finds none."""

    @abstractmethod
    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        """Start an episode. The same seed and options give the same episode in any process."""

    @abstractmethod
    def step(self, action: str) -> StepResult:
        """Apply one action: a name in `actions`, or any text. Raises `InvalidAction` for one that it doesn't know."""

    def render(self) -> Any:
        """Return a picture of the state, uint8 [height, width, 3] as a numpy array, or text. None: there is none."""
        return None

    def solution(self, max_actions: int) -> Sequence[str] | None:  # noqa: ARG002 - for those who know one
        """Actions that solve the episode from here, for a player who has time for `max_actions`. For demonstrations,
        `roll envs test`, and as what a policy is compared with.

        None: there are none, or nobody knows. Actions beyond `max_actions` aren't played, so an environment whose
        solutions don't depend on the time left needn't look at it. With several roles the actions are everybody's, each
        the best for whoever takes it.
        """
        return None

    def sample_action(self, rng: random.Random) -> str | None:  # noqa: ARG002 - for those whose actions are a space
        """Return an action that may be valid now, drawn with `rng` alone: what an agent that plays at random does.

        None: one of `actions`, or where there are none some text that needn't mean anything here.
        """
        return None

    def close(self) -> None:
        """Release resources. Default: there are none."""
