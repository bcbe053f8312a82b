"""Players of one's own for a role of a game of TextArena, which tells in words what can be done."""

from __future__ import annotations

import random
import re
from functools import reduce
from operator import xor

from roll.envs.base import Env, Observation
from roll.envs.players import Player


class AnyMark(Player):
    """Tic-tac-toe: one of the moves that the last line offers, as in `Available Moves: '[1]', '[4]'`."""

    def act(self, observation: Observation, env: Env, rng: random.Random) -> str:
        moves = re.findall(r"\[\d\]", observation.text.rpartition("Available Moves:")[2])
        if not moves:
            raise ValueError(f"no moves are offered in {observation.text!r:.200}")
        return rng.choice(moves)


class Stones(Player):
    """Nim: any move, or with `best` one after which the exclusive or of the piles is 0 (Bouton 1901), if it exists."""

    def __init__(self, *, best: bool = False) -> None:
        self._best = best

    def act(self, observation: Observation, env: Env, rng: random.Random) -> str:
        shown = observation.text.rpartition("Current Pile:")[2]
        piles = [int(stones) for stones in re.findall(r"pile \d+: (\d+)", shown)]
        moves = [(pile, taken) for pile, stones in enumerate(piles) for taken in range(1, stones + 1)]
        rest = reduce(xor, piles, 0)
        best = [(pile, taken) for pile, taken in moves if (piles[pile] - taken) ^ piles[pile] == rest and rest]
        pile, taken = rng.choice(best if self._best and best else moves)
        return f"[{pile} {taken}]"
