"""A Sokoban position as text and as sets of cells.

The text is the usual one of level files (XSB, as in Boxoban): `#` wall, ` ` floor, `.` target, `$` box, `*` box on a
target, `@` player, `+` player on a target. Row and column are folded into one index, that of the character in the text;
a set of cells is an `int` whose bit i stands for character i. Newlines are never floor, so a step can't leave a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

WALL, FLOOR, TARGET, BOX, BOX_ON_TARGET, PLAYER, PLAYER_ON_TARGET = "# .$*@+"

ACTIONS = ("Up", "Down", "Left", "Right")

_SIGNS = frozenset("# .$*@+")


def _bits(cells: str) -> dict[int, str]:
    """Return what `str.translate` makes 1 of these cells with, and 0 of all others."""
    return {ord(sign): "1" if sign in cells else "0" for sign in "# .$*@+\n"}


_FLOOR_BITS, _TARGET_BITS, _BOX_BITS = _bits(" .$*@+"), _bits(".*+"), _bits("$*")


@dataclass(frozen=True)
class Board:
    """One position. Every cell at the edge is a wall, and there are as many boxes as targets."""

    height: int
    width: int
    floor: int  # Cells that aren't walls
    targets: int
    boxes: int
    player: int  # The cell, not a set

    @property
    def stride(self) -> int:
        """From a cell to the one below it."""
        return self.width + 1

    @property
    def offsets(self) -> tuple[int, int, int, int]:
        """Return what the four actions add to a cell."""
        return (-self.stride, self.stride, -1, 1)

    @cached_property
    def shifts(self) -> tuple[tuple[int, int], ...]:
        """Return (left, right) for each action: `(cells << left) >> right` are the cells one step further."""
        return ((0, self.stride), (self.stride, 0), (0, 1), (1, 0))

    def text(self) -> str:
        """Rows, one below the other."""
        cells = list("\n".join([WALL * self.width] * self.height))
        for i in members(self.floor):
            cells[i] = FLOOR
        for i in members(self.targets):
            cells[i] = TARGET
        for i in members(self.boxes):
            cells[i] = BOX_ON_TARGET if cells[i] == TARGET else BOX
        cells[self.player] = PLAYER_ON_TARGET if cells[self.player] == TARGET else PLAYER
        return "".join(cells)


def parse_board(text: str) -> Board:
    """Read a position; a text that isn't one raises a ValueError that says why."""
    rows = text.split("\n")
    width = len(rows[0])
    if not width:
        raise ValueError("the first row is empty, expected a wall: '####'")
    for number, row in enumerate(rows, start=1):
        if len(row) != width:
            raise ValueError(f"row {number} has {len(row)} cells, the first row {width}: all rows must be equally long")
        unknown = set(row) - _SIGNS
        if unknown:
            raise ValueError(f"row {number} has {min(unknown)!r}, expected only '#', ' ', '.', '$', '*', '@' and '+'")
        if row[0] != WALL or row[-1] != WALL or (number in (1, len(rows)) and set(row) != {WALL}):
            raise ValueError(f"row {number} has a gap in the outer wall: every cell at the edge must be '#'")
    players = text.count(PLAYER) + text.count(PLAYER_ON_TARGET)
    if players != 1:
        raise ValueError(f"got {players} players, expected one '@' or '+'")
    floor, targets, boxes = (int(text[::-1].translate(bits), 2) for bits in (_FLOOR_BITS, _TARGET_BITS, _BOX_BITS))
    if not boxes or boxes.bit_count() != targets.bit_count():
        raise ValueError(
            f"got {boxes.bit_count()} boxes ('$', '*') and {targets.bit_count()} targets ('.', '*', '+'), "
            "expected the same number of both, at least 1"
        )
    player = max(text.find(PLAYER), text.find(PLAYER_ON_TARGET))
    return Board(len(rows), width, floor, targets, boxes, player)


def members(cells: int) -> list[int]:
    """Return the cells of a set, ascending."""
    result = []
    while cells:
        lowest = cells & -cells
        result.append(lowest.bit_length() - 1)
        cells ^= lowest
    return result
