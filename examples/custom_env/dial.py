"""A safe with a dial: find the secret number; after each guess you hear whether it is higher or lower."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from roll.envs.base import Env, InvalidAction, Observation, ResetNeeded, StepResult


class Dial(Env):
    """Guess a number from 1 to `highest` within `max_guesses`; fewer guesses give more reward."""

    def __init__(self, *, highest: int = 7, max_guesses: int = 3) -> None:
        if not 2 <= highest <= 1000:
            raise ValueError(f"highest: got {highest}, expected 2 to 1000")
        self.actions = tuple(str(number) for number in range(1, highest + 1))
        self.instructions = f"A secret number is between 1 and {highest}. Guess it in at most {max_guesses} guesses."
        self._highest, self._max_guesses = highest, max_guesses
        self._secret = self._guesses = 0

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        """Start an episode; the seed alone decides the secret: all episodes of a group look for the same number."""
        self._secret = random.Random(seed).randint(1, self._highest)
        self._guesses = 0
        self._low, self._high = 1, self._highest
        return self._observe("Guess.")

    def step(self, action: str) -> StepResult:
        """Take one guess."""
        if not self._secret:
            raise ResetNeeded("call reset first")
        if action not in self.actions:
            raise InvalidAction(f"Guess a number from 1 to {self._highest}.")
        guess, self._guesses = int(action), self._guesses + 1
        found = guess == self._secret
        if found or self._guesses == self._max_guesses:
            self._secret = 0
            reward = 1.0 - 0.1 * (self._guesses - 1) if found else 0.0
            return StepResult(reward=reward, terminated=True, metrics={"success": float(found)})
        if guess < self._secret:
            self._low = max(self._low, guess + 1)
        else:
            self._high = min(self._high, guess - 1)
        return StepResult(
            reward=0.0, terminated=False, observation=self._observe("Higher." if guess < self._secret else "Lower.")
        )

    def solution(self, max_actions: int) -> Sequence[str]:
        """Return the secret itself: for `roll envs test`."""
        return [str(self._secret)]

    def _observe(self, answer: str) -> Observation:
        return Observation.of(answer, state=f"{self._low} to {self._high}, {self._guesses} guesses")
