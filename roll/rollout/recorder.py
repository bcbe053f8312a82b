"""What was played so far, turn by turn."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import chain

from roll.envs.base import StepResult
from roll.strategies.base import Completion
from roll.types.episode import Status, Task, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class Response:
    """A response, and what it is a response to."""

    prompt: tuple[int, ...]  # Tokens added before it
    resets_context: bool  # The tokens before the prompt were dropped
    state: str  # Names what the policy was shown
    completion: Completion


class Recorder:
    """Collects the turns of one episode."""

    def __init__(self, task: Task, member: int) -> None:
        self._task = task
        self._member = member
        self._turns: list[Turn] = []
        self._parts: dict[str, float] = {}
        self._spans: dict[str, float] = {}
        self._status: Status = "ok"
        self._error = ""
        self._context: tuple[int, ...] = ()
        self._pieces: tuple[tuple[int, ...], ...] = ()
        self.truncated = False

    def span(self, name: str) -> Span:
        """Measure a block."""
        return Span(self._spans, name)

    def add(self, response: Response, result: StepResult | None) -> None:
        """Add one turn, with what the environment said to it if it was asked."""
        completion = response.completion
        self._turns.append(
            Turn(
                prompt_ids=response.prompt,
                response_ids=completion.token_ids,
                logprobs=completion.logprobs,
                versions=completion.versions,
                finish_reason=completion.finish_reason,
                observation="" if result is None or result.observation is None else result.observation.text,
                reward=0.0 if result is None else result.reward,
                metrics={} if result is None else dict(result.metrics),
                resets_context=response.resets_context,
                state=response.state,
            )
        )
        self._pieces += (response.prompt, completion.token_ids)
        if result is not None:
            for part, value in result.reward_parts.items():
                self._parts[part] = self._parts.get(part, 0.0) + value
            self.truncated = result.truncated

    def reset_context(self) -> None:
        """Drop the context; the turns stay."""
        self._context, self._pieces = (), ()

    @property
    def context(self) -> tuple[int, ...]:
        """Prompts and responses since it was last reset. Joined only when somebody asks: after the last turn nobody
        does."""
        if self._pieces:
            self._context = tuple(chain(self._context, *self._pieces))
            self._pieces = ()
        return self._context

    def fail(self, status: Status, error: str) -> None:
        """Note that the episode failed."""
        self._status, self._error = status, error

    def trajectory(self) -> Trajectory:
        """Return what was played."""
        status = "truncated" if self._status == "ok" and self.truncated else self._status
        return Trajectory(
            task_id=self._task.id,
            member=self._member,
            turns=tuple(self._turns),
            reward=sum(turn.reward for turn in self._turns),
            reward_parts=self._parts,
            status=status,
            error=self._error,
            spans=self._spans,
        )


class Span:
    """Adds the wall-clock seconds of a `with` block to a dictionary."""

    def __init__(self, spans: dict[str, float], name: str) -> None:
        self._spans, self._name = spans, name

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._spans[self._name] = self._spans.get(self._name, 0.0) + time.monotonic() - self._start
