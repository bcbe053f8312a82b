"""Players of one's own for a role of a game of TextArena, which tells in words what can be done; and a renderer."""

from __future__ import annotations

import random
import re
from functools import reduce
from operator import xor
from typing import Any

from roll.envs.base import Env, Observation
from roll.envs.players import Player


class AnyMark(Player):
    """Tic-tac-toe: one of the moves that the last line offers, as in `Available Moves: '[1]', '[4]'`."""

    def act(self, observation: Observation, env: Env, rng: random.Random) -> str:
        moves = re.findall(r"\[\d\]", observation.text.rpartition("Available Moves:")[2])
        if not moves:
            raise ValueError(f"no moves are offered in {observation.text!r:.200}")
        return rng.choice(moves)


def piles(game: Any, told: str) -> str:  # noqa: ARG001 - what the game told is left out
    """Tell how many stones lie where in Nim, instead of the rules and of what was done."""
    return "\n".join(f"pile {number}: {stones}" for number, stones in enumerate(game.state.game_state["piles"]))


class Stones(Player):
    """Nim as `piles` tells it: any move, or with `best` one after which the exclusive or of the piles is 0, where there
    is one (C. L. Bouton, 1901)."""

    def __init__(self, *, best: bool = False) -> None:
        self._best = best

    def act(self, observation: Observation, env: Env, rng: random.Random) -> str:
        left = [int(stones) for stones in re.findall(r"pile \d+: (\d+)", observation.text)]
        moves = [(pile, taken) for pile, stones in enumerate(left) for taken in range(1, stones + 1)]
        rest = reduce(xor, left, 0)
        winning = [(pile, taken) for pile, taken in moves if (left[pile] - taken) ^ left[pile] == rest and rest]
        pile, taken = rng.choice(winning if self._best and winning else moves)
        return f"[{pile} {taken}]"
