"""Pictures of Sokoban positions."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from roll.envs.pixels import Pixels

TILE = 24

MORTAR, BRICK, GROUND = (96, 62, 48), (156, 98, 74), (238, 232, 213)
TARGET, WOOD, WOOD_DARK = (214, 60, 60), (205, 150, 70), (126, 84, 32)
DONE, DONE_DARK = (96, 176, 92), (44, 104, 48)
SHIRT, SKIN = (48, 96, 184), (244, 202, 164)


def draw(grid: str) -> Pixels:
    """Return uint8 [24 * rows, 24 * columns, 3] of a position in the signs of `sokoban_board`."""
    tiles = _tiles()
    rows = [np.concatenate([tiles[sign] for sign in row], axis=1) for row in grid.split("\n")]
    return np.concatenate(rows, axis=0)


@lru_cache(maxsize=1)
def _tiles() -> dict[str, Pixels]:
    ground, wall = _filled(GROUND), _filled(MORTAR)
    for row in range(3):  # bricks of 8 x 11, every other row shifted by half
        for column in range(-1, 3):
            left = column * 12 + (6 if row % 2 else 0)
            wall[row * 8 : row * 8 + 7, max(left, 0) : max(left + 11, 0)] = BRICK
    target = ground.copy()
    target[_disc(12, 12, 6)] = TARGET
    target[_disc(12, 12, 3)] = GROUND
    return {
        "#": wall,
        " ": ground,
        ".": target,
        "$": _with_box(ground, WOOD, WOOD_DARK),
        "*": _with_box(ground, DONE, DONE_DARK),
        "@": _with_player(ground),
        "+": _with_player(target),
    }


def _filled(colour: tuple[int, int, int]) -> Pixels:
    return np.full((TILE, TILE, 3), colour, dtype=np.uint8)


def _disc(row: float, column: float, radius: float) -> np.ndarray:
    down, right = np.mgrid[:TILE, :TILE] + 0.5
    return np.asarray((down - row) ** 2 + (right - column) ** 2 <= radius**2)


def _with_box(ground: Pixels, colour: tuple[int, int, int], edge: tuple[int, int, int]) -> Pixels:
    tile = ground.copy()
    tile[2:22, 2:22] = edge
    tile[4:20, 4:20] = colour
    for i in range(4, 20):  # a cross of two boards
        tile[i, max(i - 1, 4) : min(i + 2, 20)] = edge
        tile[i, max(22 - i, 4) : min(25 - i, 20)] = edge
    return tile


def _with_player(ground: Pixels) -> Pixels:
    tile = ground.copy()
    tile[_disc(23, 12, 9) & (np.arange(TILE)[:, None] < 23)] = SHIRT
    tile[_disc(9, 12, 5.5)] = SKIN
    tile[8:10, 9:11] = tile[8:10, 13:15] = (40, 40, 40)
    return tile
