"""A game that a tiny random model learns in seconds: answer every letter in its own case, for a few turns.

A quarter of the characters are right at the start, so there is a reward to climb from the first step.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping
from typing import Any

from roll.envs.base import Env, InvalidAction, Observation, StepResult
from roll.utils.seeding import stable_hash


class Letters(Env):
    """Shows `l` or `U`; a response in lower or upper case is right."""

    instructions = "case"

    def __init__(self, turns: int = 3) -> None:
        self._turns = turns

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        rng = random.Random(stable_hash("letters", seed))
        self._wanted = [rng.choice("lU") for _ in range(self._turns)]
        self._right: list[bool] = []
        return self._shown()

    def _shown(self) -> Observation:
        return Observation.of(f"{self._wanted[len(self._right)]}=", state=self._wanted[len(self._right)])

    def step(self, action: str) -> StepResult:
        check = str.islower if self._wanted[len(self._right)] == "l" else str.isupper
        share = sum(map(check, action[:2])) / 2
        self._right.append(share == 1)
        over = len(self._right) == self._turns
        return StepResult(
            reward=share,
            terminated=over,
            observation=None if over else self._shown(),
            metrics={"success": float(all(self._right))} if over else {},
        )

    def solution(self, max_actions: int) -> list[str]:
        return ["aa" if wanted == "l" else "AA" for wanted in self._wanted[len(self._right) :]]


class Faulty(Letters):
    """Does what it shouldn't in a share of its episodes.

    Seed and responses decide which. Those of a group have one seed, so a fault in `reset` strikes the whole group, and
    one in the last step single members of it.
    """

    def __init__(self, turns: int = 3, fault: str = "raise", where: str = "step", share: float = 0.2) -> None:
        super().__init__(turns)
        self._fault, self._where, self._share = fault, where, share

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        self._seed, self._said = seed, ""
        return self._answer("reset", super().reset(seed, options))

    def step(self, action: str) -> StepResult:
        self._said += action
        result = super().step(action)
        return self._answer("step" if result.terminated else "", result)

    def _answer(self, where: str, right: Any) -> Any:
        drawn = random.Random(stable_hash("fault", self._seed, self._said)).random()
        if where != self._where or drawn >= self._share:
            return right
        if self._fault == "raise":
            raise KeyError("no such letter")
        if self._fault == "hang":
            time.sleep(1000)
        if self._fault == "exit":
            os._exit(3)
        return ("not", "what", "was", "asked", "for")


class Unsteady(Letters):
    """Begins in another way every time, whatever the seed."""

    begun = 0

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        Unsteady.begun += 1
        return super().reset(Unsteady.begun, options)


class Deaf(Letters):
    """Understands nothing."""

    def step(self, action: str) -> StepResult:
        raise InvalidAction("what?")
