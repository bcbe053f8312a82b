"""FrozenLake: walk over the ice to the goal without falling into a hole; the ice may be slippery."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from roll.envs.base import Env, InvalidAction, Observation, ResetNeeded, StepResult
from roll.envs.frozen_lake_map import ACTIONS, NO_ACTION, Lake, best_actions, parse_rows, random_rows
from roll.envs.held_out import Part, check_part, room_of_part
from roll.envs.pixels import Pixels
from roll.utils.seeding import stable_hash

SYMBOLS = {"S": "_", "F": "_", "H": "O", "G": "G"}
SHOWN = str.maketrans(SYMBOLS)
PLAYER = "P"

TILE = 24
ICE, EDGE, WATER, GOAL, COAT = (222, 238, 248), (190, 214, 232), (40, 84, 140), (88, 168, 88), (200, 64, 56)


class FrozenLake(Env):
    """Walk over the ice to the goal without falling into a hole.

    Each seed has a map of its own, with a way to the goal; start is top left, goal bottom right. The dynamics are those
    of gymnasium's FrozenLake. On slippery ice one goes aside with some probability; how one slips depends on seed and
    number of the step alone.

    Rewards: `reward_goal` at the goal, `reward_hole` in a hole, `reward_step` for any other step. Goal and holes
    terminate the episode. Metrics: `success` in the last step, `moved` (the action changed the cell).

    Args:
        size: rows and columns.
        p: probability that a cell is frozen.
        map: rows of S, F, H and G, instead of a map per seed; with it, `size` and `p` are left out.
        part: `held_out` takes the fifth of all maps that `train` leaves out: with one environment for training and one
            for validation the policy is validated on maps that it has never met.
        slippery: whether one may slip.
        success_rate: probability of going where one wants on slippery ice; the rest is shared by the two directions
            beside it.
        reward_goal, reward_hole, reward_step: see above.
    """

    actions = ACTIONS

    def __init__(
        self,
        *,
        size: int = 4,
        p: float = 0.8,
        map: Sequence[str] | None = None,
        part: Part = "all",
        slippery: bool = False,
        success_rate: float = 1 / 3,
        reward_goal: float = 1.0,
        reward_hole: float = 0.0,
        reward_step: float = 0.0,
    ) -> None:
        if not isinstance(size, int) or isinstance(size, bool) or size < 2:
            raise ValueError(f"size: got {size!r}, expected a whole number of at least 2")
        for name, value in {"p": p, "success_rate": success_rate}.items():
            if not 0 <= value <= 1:
                raise ValueError(f"{name}: got {value!r}, expected a probability")
        if map is not None and (size, p) != (4, 0.8):
            raise ValueError("map: a map has a size and holes of its own; leave out size and p, or map")
        check_part(part)
        if part != "all" and map is not None:
            raise ValueError(f"part: got {part!r} with a map, of which there is one only; leave it out")
        self._size, self._p = size, p
        self._part: Part = part
        self._rows = None if map is None else parse_rows(map)
        self._success_rate = success_rate if slippery else 1.0
        self.one_episode = map is not None and self._success_rate == 1.0
        self._rewards = {"G": reward_goal, "H": reward_hole, "F": reward_step, "S": reward_step}
        self._lake: Lake | None = None
        self._signs = self._empty = ""
        self._seed = self._cell = self._step = 0
        self.instructions = (
            "You are on a frozen lake. Walk to the goal; falling into a hole ends the game.\n"
            f"The symbols: {PLAYER} you, {SYMBOLS['F']} ice, {SYMBOLS['H']} hole, {SYMBOLS['G']} goal.\n"
            "Actions: Left, Down, Right, Up. Each moves you by one cell; at the edge you stay where you are."
            + (" The ice is slippery: you may go to a side instead." if slippery else "")
        )

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        if options:
            raise ValueError(f"FrozenLake has no options, got {', '.join(sorted(options))}: leave them out")
        rows = self._rows or room_of_part(self._part, seed, self._random, "".join)
        self._lake = Lake(rows, self._success_rate)
        self._seed, self._step, self._cell = seed, 0, self._lake.start
        self._signs = "".join(self._lake.rows)
        self._empty = "\n".join([" ".join(row) for row in self._lake.rows]).translate(SHOWN)
        return self._observe()

    def step(self, action: str) -> StepResult:
        lake = self._lake
        if lake is None or self._signs[self._cell] in "GH":
            raise ResetNeeded("no episode under way: call reset first")
        if action not in ACTIONS:
            raise InvalidAction(f"got {action!r}, expected one of {', '.join(ACTIONS)}")
        before = self._cell
        self._cell = lake.after(before, ACTIONS.index(action), self._draw(self._step))
        self._step += 1
        sign = self._signs[self._cell]
        over = sign in "GH"
        metrics = {"moved": float(self._cell != before)}
        if over:
            metrics["success"] = float(sign == "G")
        observation = None if over else self._observe()
        return StepResult(reward=self._rewards[sign], terminated=over, observation=observation, metrics=metrics)

    def _random(self, seed: int) -> tuple[str, ...]:
        return random_rows(self._size, self._p, seed)

    @property
    def lake(self) -> Lake:
        """Return the map of this episode; `frozen_lake_solver.best_actions` takes it."""
        assert self._lake is not None, "reset comes first"
        return self._lake

    @property
    def text(self) -> str:
        """Return the lake as the policy sees it."""
        offset = 2 * self._cell  # every cell is a symbol, and a blank or the end of the line
        return f"{self._empty[:offset]}{PLAYER}{self._empty[offset + 1 :]}"

    def _observe(self) -> Observation:
        text = self.text
        return Observation.of(text, text)

    def render(self) -> Pixels:
        lake = self.lake
        colours = {"S": ICE, "F": ICE, "H": WATER, "G": GOAL}
        picture = np.empty((len(lake.rows) * TILE, lake.width * TILE, 3), dtype=np.uint8)
        down, right = np.mgrid[:TILE, :TILE] + 0.5
        from_centre = (down - TILE / 2) ** 2 + (right - TILE / 2) ** 2
        for cell in range(lake.num_cells):
            row, column = cell // lake.width * TILE, cell % lake.width * TILE
            tile = picture[row : row + TILE, column : column + TILE]
            tile[:] = EDGE
            tile[1:-1, 1:-1] = ICE
            if lake.sign(cell) in "GH":
                tile[from_centre <= 10**2] = colours[lake.sign(cell)]
            if cell == self._cell:
                tile[from_centre <= 6**2] = COAT
        return picture

    def solution(self, max_actions: int) -> Sequence[str] | None:
        """Return what the best policy for so many actions does from here, slips included; None where it doesn't get
        there.

        The policy knows the probabilities and the time, not how it will slip in this episode.
        """
        best = best_actions(self.lake, max_actions)
        cell, walk = self._cell, list[str]()
        while (action := best[max_actions - len(walk), cell]) != NO_ACTION:
            cell = self.lake.after(cell, action, self._draw(self._step + len(walk)))
            walk.append(ACTIONS[action])
        return walk if self.lake.sign(cell) == "G" else None

    def _draw(self, step: int) -> float:
        """Draw a number in [0, 1) for a step of this episode."""
        if self.lake.success_rate == 1.0:
            return 0.0
        return stable_hash("frozen-lake-slip", self._seed, step, bits=32) / 2**32
