"""A player of one's own for a role of a game of TextArena, which tells in words what can be done."""

from __future__ import annotations

import random
import re

from roll.envs.base import Env, Observation
from roll.envs.players import Player


class AnyMark(Player):
    """Tic-tac-toe: one of the moves that the last line offers, as in `Available Moves: '[1]', '[4]'`."""

    def act(self, observation: Observation, env: Env, rng: random.Random) -> str:
        moves = re.findall(r"\[\d\]", observation.text.rpartition("Available Moves:")[2])
        if not moves:
            raise ValueError(f"no moves are offered in {observation.text!r:.200}")
        return rng.choice(moves)
