"""Maps of frozen lakes: how one moves on them, and random ones from a seed.

The signs and the dynamics are those of gymnasium's FrozenLake: S start, F frozen, H hole, G goal.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from roll.utils.seeding import stable_hash

ACTIONS = ("Left", "Down", "Right", "Up")  # Each one's neighbours in this circle are the directions one may slip to
OFFSETS = ((0, -1), (1, 0), (0, 1), (-1, 0))  # Rows and columns that an action moves by
Outcomes = tuple[tuple[float, int], ...]
_ATTEMPTS = 100


@dataclass(frozen=True, slots=True)
class Lake:
    """A map. Cells are numbered row by row."""

    rows: tuple[str, ...]
    success_rate: float = 1.0
    """Probability of going where one wants; the rest is shared by the two directions beside it."""

    @property
    def width(self) -> int:
        """Columns."""
        return len(self.rows[0])

    @property
    def num_cells(self) -> int:
        """Cells."""
        return len(self.rows) * self.width

    @property
    def start(self) -> int:
        """Return the cell S."""
        return "".join(self.rows).index("S")

    def sign(self, cell: int) -> str:
        """Return what is there: S, F, H or G."""
        return self.rows[cell // self.width][cell % self.width]

    def move(self, cell: int, direction: int) -> int:
        """Return the cell that one gets to by going this way; at the edge one stays."""
        return _moves(len(self.rows), self.width)[cell][direction]

    def outcomes(self, cell: int, action: int) -> Outcomes:
        """Return (probability, cell) of everything that an action may lead to; goal and holes aren't left."""
        if self.sign(cell) in "GH":
            return ((1.0, cell),)
        return _outcomes(len(self.rows), len(self.rows[0]), self.success_rate)[cell][action]

    def after(self, cell: int, action: int, draw: float) -> int:
        """Return the one outcome that a number in [0, 1) stands for."""
        for probability, reached in self.outcomes(cell, action):
            if draw < probability:
                return reached
            draw -= probability
        return reached  # the probabilities add up to a bit less than 1


@lru_cache(maxsize=64)
def _moves(height: int, width: int) -> tuple[tuple[int, ...], ...]:
    """Return where each direction leads from each cell."""
    return tuple(
        tuple(
            (row + down) * width + column + right
            if 0 <= row + down < height and 0 <= column + right < width
            else row * width + column
            for down, right in OFFSETS
        )
        for row in range(height)
        for column in range(width)
    )


@lru_cache(maxsize=64)
def _outcomes(height: int, width: int, success_rate: float) -> tuple[tuple[Outcomes, ...], ...]:
    """Return (probability, cell) of everything that each action may lead to from each cell, holes or not."""
    moves, actions = _moves(height, width), range(len(ACTIONS))
    if success_rate == 1.0:
        return tuple(tuple(((1.0, reached[action]),) for action in actions) for reached in moves)
    aside = (1.0 - success_rate) / 2
    return tuple(
        tuple(
            ((aside, reached[action - 1]), (success_rate, reached[action]), (aside, reached[(action + 1) % 4]))
            for action in actions
        )
        for reached in moves
    )


def parse_rows(rows: Sequence[str]) -> tuple[str, ...]:
    """Rows of a map, checked; raises `ValueError`."""
    if isinstance(rows, str) or not rows or not all(isinstance(row, str) and row for row in rows):
        raise ValueError(f"map: got {rows!r:.200}, expected rows, e.g. ['SFF', 'FHF', 'FFG']")
    signs = "".join(rows)
    if len({len(row) for row in rows}) > 1 or set(signs) - set("SFHG"):
        raise ValueError(f"map: got {list(rows)!r:.200}, expected rows of one length, made of S, F, H and G")
    if signs.count("S") != 1 or "G" not in signs:
        raise ValueError(f"map: got {list(rows)!r:.200}, expected one S and at least one G")
    return tuple(rows)


def random_rows(size: int, p: float, seed: int) -> tuple[str, ...]:
    """Return a square map with a way from S, top left, to G, bottom right; other cells are frozen with probability
    `p`."""
    for attempt in range(_ATTEMPTS):
        rng = random.Random(stable_hash("frozen-lake", seed, attempt))
        signs = ["F" if rng.random() < p else "H" for _ in range(size * size)]
        rows = _with_ends(signs, size)
        if _has_way(rows):
            return rows
    # So many holes that chance takes too long: a random way is kept free.
    row = column = 0
    while row < size - 1 or column < size - 1:
        signs[row * size + column] = "F"
        down = column == size - 1 or (row < size - 1 and rng.random() < 0.5)
        row, column = (row + 1, column) if down else (row, column + 1)
    return _with_ends(signs, size)


def _with_ends(signs: Sequence[str], size: int) -> tuple[str, ...]:
    text = "S" + "".join(signs[1:-1]) + "G"
    return tuple(text[i : i + size] for i in range(0, size * size, size))


def _has_way(rows: tuple[str, ...]) -> bool:
    signs, moves = "".join(rows), _moves(len(rows), len(rows[0]))
    border = [signs.index("S")]
    reached = set(border)
    while border:
        for after in moves[border.pop()]:
            if signs[after] == "G":
                return True
            if after not in reached and signs[after] != "H":
                reached.add(after)
                border.append(after)
    return False


IMPATIENCE = 1e-6
"""What a step costs, as a share of the chance to get there: of two ways that are as safe the shorter one is taken."""
NO_ACTION = -1


@lru_cache(maxsize=256)
def best_actions(lake: Lake, steps: int) -> np.ndarray:
    """Return the action that most likely leads to the goal in time, by backward induction over the steps left.

    Returns int8 [steps + 1, cells], read-only: row t holds numbers of `ACTIONS` for a player who has t steps left,
    `NO_ACTION` in holes, at the goal, and where the goal can't be reached in time. Ties go to the first action.
    """
    chances, reached = _tables(lake)
    signs = np.array([lake.sign(cell) for cell in range(lake.num_cells)])
    goal, over = signs == "G", (signs == "G") | (signs == "H")
    actions = np.full((steps + 1, lake.num_cells), NO_ACTION, dtype=np.int8)
    values = goal.astype(float)
    for left in range(1, steps + 1):
        by_action = (chances * values[reached]).sum(-1) * (1 - IMPATIENCE)
        best = np.round(by_action, 9).argmax(1)
        values = np.where(over, goal, by_action.max(1))
        actions[left] = np.where(over | (values == 0), NO_ACTION, best)
    actions.flags.writeable = False
    return actions


def _tables(lake: Lake) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities and cells of all outcomes: [cells, 4 actions, outcomes]; missing ones have probability 0."""
    chances = np.zeros((lake.num_cells, 4, 3))
    reached = np.zeros((lake.num_cells, 4, 3), dtype=np.int64)
    for cell in range(lake.num_cells):
        for action in range(4):
            for i, (probability, after) in enumerate(lake.outcomes(cell, action)):
                chances[cell, action, i], reached[cell, action, i] = probability, after
    return chances, reached
