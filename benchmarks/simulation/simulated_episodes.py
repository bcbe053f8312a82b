"""Tasks, environments and an agent without content, for simulations: only their number, lengths and times are real."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.simulation.simulated_engines import TOKEN
from roll.envs.base import Message, Observation, StepResult
from roll.rollout.agent import Agent
from roll.rollout.episode_key import Action
from roll.types.trajectory import EpisodeError, Task
from roll.utils.seeding import stable_hash


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeModel:
    """What an episode is like, apart from its responses."""

    prompt_tokens: int = 512
    turns: int = 1  # Responses per episode
    reply_tokens: int = 128  # What the environment adds between two turns
    env_seconds: float = 0.0  # What an environment's step, or a reward, takes
    failure_share: float = 0.0  # Environment steps that fail

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.turns < 1 or self.reply_tokens < 1:
            raise ValueError(f"prompt_tokens, turns and reply_tokens must be >= 1, got {self}")
        if self.env_seconds < 0 or not 0 <= self.failure_share < 1:
            raise ValueError(f"env_seconds must be >= 0 and failure_share in [0, 1), got {self}")


class SimulatedTasks:
    """An endless source that counts what it gave and got back."""

    def __init__(self) -> None:
        self._next = 0
        self._returned: deque[Task] = deque()
        self.taken = 0
        self.put = 0

    def take(self, n: int) -> list[Task]:
        """Return `n` tasks; those that were put back come first."""
        tasks = []
        for _ in range(n):
            if self._returned:
                tasks.append(self._returned.popleft())
            else:
                name = f"t{self._next}"
                tasks.append(Task(id=name, source="simulated", payload={}, seed=self._next, tag="", domain=""))
                self._next += 1
        self.taken += n
        return tasks

    def put_back(self, tasks: Sequence[Task]) -> None:
        """Take tasks back; they come first next time, in this order."""
        self._returned.extendleft(reversed(tasks))
        self.put += len(tasks)

    def state_dict(self, unfinished: Sequence[Task] = ()) -> dict[str, Any]:
        return {"next": self._next, "returned": [task.id for task in (*unfinished, *self._returned)]}


class SimulatedAgent(Agent):
    """Prompts of the right length; all text is empty."""

    def __init__(self, model: EpisodeModel) -> None:
        super().__init__(None, self._first_prompt_of, chat=False)
        self._prompt = (TOKEN,) * model.prompt_tokens
        self._reply = (TOKEN,) * model.reply_tokens

    def _first_prompt_of(self, task: Task, observation: Observation) -> tuple[int, ...]:
        del task, observation
        return self._prompt

    def reply(self, observation: Observation, sampled: Sequence[int]) -> tuple[int, ...]:
        del observation, sampled
        return self._reply

    def opens_thought(self, prompt_ids: Sequence[int], response_ids: Sequence[int], text: str) -> bool:
        del prompt_ids, response_ids, text
        return False

    def decode_response(self, token_ids: Sequence[int], stop_strings: Sequence[str]) -> str:
        del token_ids, stop_strings
        return ""


_NOTHING = Observation((Message("user", ""),))


class SimulatedEnv:
    """Waits, then ends or goes on."""

    waits_for = "environment"

    def __init__(self, model: EpisodeModel, name: str) -> None:
        self._model = model
        self._name = name
        self._turn = 0

    async def reset(self, task: Task) -> Observation:
        del task
        return _NOTHING

    async def step(self, action: Action) -> StepResult:
        """Give reward 0 or 1 by a keyed draw, so that filters have something to do."""
        del action
        self._turn += 1
        if self._model.env_seconds:
            await asyncio.sleep(self._model.env_seconds)
        if self._model.failure_share and self._draw("failure") < self._model.failure_share:
            raise EpisodeError("env_error", "a simulated failure")
        last = self._turn >= self._model.turns
        return StepResult(
            reward=float(self._draw("reward") < 0.5), terminated=last, observation=None if last else _NOTHING
        )

    async def close(self) -> None:
        pass

    def _draw(self, what: str) -> float:
        return stable_hash(what, self._name, self._turn) / 2**64
