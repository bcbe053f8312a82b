"""Nim: two players take stones from heaps in turn, and the last stone decides. Its perfect player is known."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import xor
from typing import Any

from roll.envs.base import Env, InvalidAction, Observation, ResetNeeded, StepResult
from roll.utils.seeding import stable_hash

ROLES = ("first", "second")


class Nim(Env):
    """Take stones in turn; whoever takes the last one wins, or with `last_wins: false` loses.

    Roles are `first` and `second`, by who begins. Each seed has heaps of its own. With one heap an action is how many
    stones to take (`3`), with several the heap's number from 1 and how many (`2 3`). One that the heaps don't permit is
    an invalid action. The winner gets 1 and the loser -1. Metrics: `success/<role>` in the last step, and `best_moves`
    and `won_positions` in every step: 1 where the position could be won, and where the action kept it so.

    Args:
        num_heaps: heaps.
        min_heap, max_heap: stones of a heap at the beginning, bounds included.
        max_take: stones that may be taken at once; null: a whole heap.
        last_wins: whether the last stone wins.
    """

    roles = ROLES

    def __init__(
        self,
        *,
        num_heaps: int = 1,
        min_heap: int = 5,
        max_heap: int = 20,
        max_take: int | None = 3,
        last_wins: bool = True,
    ) -> None:
        bounds = (("num_heaps", num_heaps, 20), ("min_heap", min_heap, 1000), ("max_heap", max_heap, 1000))
        for name, value, most in (*bounds, ("max_take", 1 if max_take is None else max_take, 1000)):
            if not isinstance(value, int) or not 1 <= value <= most:
                raise ValueError(f"{name}: got {value!r}, expected a whole number from 1 to {most}")
        if min_heap > max_heap:
            raise ValueError(f"max_heap: got {min_heap} to {max_heap}, expected min_heap <= max_heap")
        if num_heaps * min_heap < 2:
            raise ValueError("min_heap: got 1 for a single heap, expected at least 2: the game is over in one move")
        self._num_heaps, self._sizes = num_heaps, range(min_heap, max_heap + 1)
        self._max_take = max_heap if max_take is None else min(max_take, max_heap)
        self._last_wins = last_wins
        self._heaps: tuple[int, ...] = ()
        self._turn = 0
        takes = [str(n) for n in range(1, self._max_take + 1)]
        numbers = range(1, num_heaps + 1)
        self.actions = tuple(takes if num_heaps == 1 else [f"{heap} {n}" for heap in numbers for n in takes])
        how = "how many stones you take" if num_heaps == 1 else "the number of a heap and how many stones you take"
        allowed = f"1 to {self._max_take}" if self._max_take < max_heap else "at least 1"
        self.instructions = (
            f"Two players take stones in turn, {allowed} of one heap. Whoever takes the last stone "
            f"{'wins' if last_wins else 'loses'}.\nAn answer is {how}, e.g. {self.actions[-1]}."
        )

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        if options:
            raise ValueError(f"Nim has no options, got {', '.join(sorted(options))}: leave them out")
        rng = random.Random(stable_hash("nim", seed))
        self._heaps = tuple(rng.choice(self._sizes) for _ in range(self._num_heaps))
        self._turn = 0
        return self._observation()

    def step(self, action: str) -> StepResult:
        if not any(self._heaps):
            raise ResetNeeded("no episode under way: call reset first")
        before, role = self._winning(self._heaps), ROLES[self._turn]
        heap, taken = self._parse(action)
        self._heaps = tuple(stones - taken * (i == heap) for i, stones in enumerate(self._heaps))
        metrics = {"won_positions": float(before), "best_moves": float(before and not self._winning(self._heaps))}
        self._turn = 1 - self._turn
        if any(self._heaps):
            return StepResult(reward=0.0, terminated=False, observation=self._observation(), metrics=metrics)
        winner = role if self._last_wins else ROLES[self._turn]
        return StepResult(
            reward=0.0,
            terminated=True,
            role_rewards={name: 1.0 if name == winner else -1.0 for name in ROLES},
            metrics={**metrics, **{f"success/{name}": float(name == winner) for name in ROLES}},
        )

    def render(self) -> str:
        return self._shown()

    def solution(self, max_actions: int) -> Sequence[str] | None:  # noqa: ARG002 - a game has an end
        """Best play of both sides. Who has lost takes one stone from the largest heap, which makes the game long."""
        heaps, actions = self._heaps, []
        while any(heaps):
            after = [(self._after(heaps, heap, taken), heap, taken) for heap, taken in self._moves(heaps)]
            lost = [move for move in after if not self._winning(move[0])]
            heaps, heap, taken = lost[0] if lost else min(after, key=lambda m: (m[2], -heaps[m[1]]))
            actions.append(self._name(heap, taken))
        return actions or None

    def sample_action(self, rng: random.Random) -> str | None:
        return self._name(*rng.choice(self._moves(self._heaps))) if any(self._heaps) else None

    def _observation(self) -> Observation:
        shown = self._shown()
        return Observation.of(shown, shown, ROLES[self._turn])

    def _shown(self) -> str:
        return f"Stones: {', '.join(map(str, self._heaps))}"

    def _parse(self, action: str) -> tuple[int, int]:
        """Return the heap, from 0, and how many stones are taken."""
        words = action.split()
        if len(words) != min(2, self._num_heaps) or not all(word.isdecimal() and len(word) < 5 for word in words):
            raise InvalidAction(f"An answer is like {self.actions[-1]}.")
        heap, taken = int(words[0]) - 1 if len(words) == 2 else 0, int(words[-1])
        if not 0 <= heap < self._num_heaps:
            raise InvalidAction(f"There is no heap {words[0]}.")
        if (heap, taken) not in self._moves(self._heaps):
            most = min(self._max_take, self._heaps[heap])
            raise InvalidAction(f"You may take 1 to {most} stones there." if most else f"Heap {words[0]} is empty.")
        return heap, taken

    def _name(self, heap: int, taken: int) -> str:
        return str(taken) if self._num_heaps == 1 else f"{heap + 1} {taken}"

    def _moves(self, heaps: Sequence[int]) -> list[tuple[int, int]]:
        return [(i, n) for i, stones in enumerate(heaps) for n in range(1, min(self._max_take, stones) + 1)]

    @staticmethod
    def _after(heaps: Sequence[int], heap: int, taken: int) -> tuple[int, ...]:
        return tuple(stones - taken * (i == heap) for i, stones in enumerate(heaps))

    def _winning(self, heaps: Sequence[int]) -> bool:
        """Return whether the role whose turn it is can win."""
        return _won(heaps, self._max_take, self._last_wins)


def _won(heaps: Sequence[int], max_take: int, last_wins: bool) -> bool:
    """Return whether whoever moves can win, by the theory of nim (Bouton 1901; with `max_take` heaps count modulo k +
    1).

    Normal play is won where the exclusive or of the heaps' remainders isn't 0. Where the last stone loses it is the
    same as long as some heap has a remainder above 1, and the other way round where none has.
    """
    remainders = [stones % (max_take + 1) for stones in heaps]
    nim_sum = reduce(xor, remainders, 0)
    return (nim_sum != 0) is (last_wins or max(remainders) > 1)
