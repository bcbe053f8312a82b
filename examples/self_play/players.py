"""A player of one's own for a role: any legal mark in TextArena's tic-tac-toe, whose observations list them."""

from __future__ import annotations

import random
import re

from roll.envs.base import Env, Observation
from roll.envs.players import Player


class AnyMark(Player):
    """Draws one of the moves that the last line of the observation offers: `Available Moves: '[1]', '[4]'`."""

    def act(self, observation: Observation, env: Env, rng: random.Random) -> str:
        moves = re.findall(r"\[\d\]", observation.text.rpartition("Available Moves:")[2])
        if not moves:
            raise ValueError(f"no moves are offered in {observation.text!r:.200}")
        return rng.choice(moves)
