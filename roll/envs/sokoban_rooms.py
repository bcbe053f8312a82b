"""Sokoban rooms from a seed: carved at random, then played backwards from the solved position.

What was reached backwards has a solution, so no room needs to be thrown away for want of one. Small rooms are explored
in full and the start is drawn uniformly from all positions; in large ones boxes are pulled away at random.

A change that gives other rooms for the same seed needs a new version in the environment's id.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import comb
from pathlib import Path
from types import MappingProxyType

from roll.envs.sokoban_board import Board, members, parse_board
from roll.envs.sokoban_solver import SearchLimitError, layers_before_solved, reachable, solve
from roll.utils.seeding import stable_hash

ATTEMPTS = 200
EXPLORED_NODES = 3000  # some 10 ms
SOLVER_NODES = 100_000  # some 0.3 s; only with min_solution in large rooms
SHAPES = (  # cells (row, column) around the one that is dug; each is connected with it
    ((0, 0),),
    ((0, 0), (0, 1)),
    ((0, 0), (1, 0)),
    ((0, 0), (0, 1), (1, 0)),
    ((0, 0), (0, 1), (1, 0), (1, 1)),
)


@dataclass(frozen=True)
class RoomSettings:
    """What a room must be like; `height` and `width` count the outer wall."""

    height: int
    width: int
    num_boxes: int
    min_solution: int = 1  # Moves of the shortest solution, at least
    max_solution: int | None = None


def generate_room(settings: RoomSettings, seed: int) -> str:
    """Return the room of this seed, as text. A ValueError says so when none was found within `ATTEMPTS`."""
    rng = random.Random(stable_hash("sokoban", settings.height, settings.width, settings.num_boxes, seed))
    for attempt in range(ATTEMPTS):
        # Crowded rooms may only work out without inner walls, so the later attempts have ever fewer of these.
        board = _carve(settings, rng, at_least=attempt / ATTEMPTS)
        start = _scramble(board, settings, rng, all_off_target=attempt < ATTEMPTS // 4)
        if start is not None:
            return start.text()
    longest = "any" if settings.max_solution is None else settings.max_solution
    raise ValueError(
        f"no room found for seed {seed} in {ATTEMPTS} attempts with dim_room=({settings.height}, {settings.width}), "
        f"num_boxes={settings.num_boxes}, min_solution={settings.min_solution}, max_solution={longest}: "
        "use a larger dim_room, fewer boxes, or a wider range of solutions"
    )


def _below(rng: random.Random, bound: int) -> int:
    """Draw by `random()`: of `random.Random` only this is promised to stay the same in every version of Python."""
    return int(rng.random() * bound)


def _carve(settings: RoomSettings, rng: random.Random, *, at_least: float) -> Board:
    """Carve a connected room with targets, and the boxes on them."""
    height, width, stride = settings.height, settings.width, settings.width + 1
    inner = (height - 2) * (width - 2)
    share = max(0.5 + 0.4 * rng.random(), at_least)
    wanted = min(inner, max(round(share * inner), settings.num_boxes + 2, 4))
    row, column = 1 + _below(rng, height - 2), 1 + _below(rng, width - 2)
    shapes, inside = _shape_cells(height, width)
    draw, floor, missing = rng.random, 0, wanted
    while missing:
        dug = shapes[int(draw() * len(shapes))] << (row * stride + column) & inside & ~floor
        while dug.bit_count() > missing:
            dug ^= 1 << dug.bit_length() - 1  # the last cell of the shape isn't needed
        floor |= dug
        missing -= dug.bit_count()
        step = 1 if draw() < 0.5 else -1
        if draw() < 0.5:
            row += step if 1 <= row + step <= height - 2 else 0
        else:
            column += step if 1 <= column + step <= width - 2 else 0
    cells = members(floor)
    targets = 0
    for _ in range(settings.num_boxes):
        targets |= 1 << cells.pop(_below(rng, len(cells)))
    return Board(height, width, floor, targets, boxes=targets, player=cells[_below(rng, len(cells))])


@lru_cache(maxsize=64)
def _shape_cells(height: int, width: int) -> tuple[tuple[int, ...], int]:
    """Return `SHAPES` as sets of cells around cell 0, and the cells inside the outer wall."""
    stride = width + 1
    shapes = tuple(sum(1 << (below * stride + right) for below, right in shape) for shape in SHAPES)
    return shapes, sum(1 << (row * stride + column) for row in range(1, height - 1) for column in range(1, width - 1))


def _scramble(board: Board, settings: RoomSettings, rng: random.Random, *, all_off_target: bool) -> Board | None:
    """Pull boxes off targets into a position of this room that keeps to the settings; None if there is none, or none
    was found.

    `all_off_target`: with no box on a target. In crowded rooms there may be no such position.
    """
    bounded = settings.min_solution > 1 or settings.max_solution is not None
    if bounded or comb(board.floor.bit_count(), settings.num_boxes) <= EXPLORED_NODES // 20:
        layers, complete = layers_before_solved(board, settings.max_solution, EXPLORED_NODES)
        fitting = [
            (boxes, players)
            for layer in layers[settings.min_solution :]
            for boxes, players in layer.items()
            if not (all_off_target and boxes & board.targets)
        ]
        if complete or (bounded and fitting):
            return _draw(board, fitting, rng)
    best, farthest = None, 0.0
    for position, distance in _random_pulls(board, rng, count=25 * settings.num_boxes):
        is_valid = not position.boxes & board.targets if all_off_target else position.boxes != board.targets
        if distance > farthest and is_valid:
            best, farthest = position, distance
    if best is None or not bounded:
        return best
    try:
        moves = solve(best.text(), SOLVER_NODES)
    except SearchLimitError:
        return None
    assert moves is not None
    longest = len(moves) if settings.max_solution is None else settings.max_solution
    return best if settings.min_solution <= len(moves) <= longest else None


def _draw(board: Board, positions: list[tuple[int, int]], rng: random.Random) -> Board | None:
    """Draw one of all these positions, each as likely as the others."""
    number = _below(rng, sum(players.bit_count() for _, players in positions))
    for boxes, players in positions:
        if number < players.bit_count():
            return replace(board, boxes=boxes, player=members(players)[number])
        number -= players.bit_count()
    return None


def _random_pulls(board: Board, rng: random.Random, count: int) -> Iterator[tuple[Board, float]]:
    """Positions after random pulls, with how far the boxes are from where they began; the least far weighs most."""
    cells = members(board.targets)
    begun = list(cells)
    boxes, player = board.boxes, board.player
    last: tuple[int, int] | None = None  # which box, which way
    for _ in range(count):
        reached = reachable(board, boxes, player)
        # A box at `cell` goes to `cell + offset` where the player stands, who steps back to `cell + 2 * offset`.
        pulls = [
            (index, offset)
            for index, cell in enumerate(cells)
            for offset in board.offsets
            if reached >> (cell + offset) & 1 and reached >> (cell + 2 * offset) & 1
        ]
        if not pulls:
            return
        if last not in pulls or rng.random() < 0.4:  # mostly go on, so that boxes get somewhere
            last = pulls[_below(rng, len(pulls))]
        index, offset = last
        boxes ^= 1 << cells[index] ^ 1 << (cells[index] + offset)
        cells[index] += offset
        player = cells[index] + offset
        moved = [_distance(board, a, b) for a, b in zip(begun, cells, strict=True)]
        yield replace(board, boxes=boxes, player=player), sum(moved) + 4 * min(moved)


def _distance(board: Board, first: int, second: int) -> int:
    rows = abs(first // board.stride - second // board.stride)
    return rows + abs(first % board.stride - second % board.stride)


def load_levels(path: str | Path) -> Mapping[int, str]:
    """Return the levels of a file by their numbers, as text (`sokoban_board`). Read once per process and version of the
    file.

    A ValueError names the file and the line of what is wrong.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"no level file {str(path)!r}; expected a text file in the format of Boxoban")
    status = file.stat()
    return _read(file, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=16)
def _read(file: Path, modified: int, size: int) -> Mapping[int, str]:  # noqa: ARG001 (they are there for the cache)
    rows: dict[int, list[str]] = {}
    headings: dict[int, str] = {}  # Where they are
    for line_number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        line, where = line.rstrip(), f"{file}:{line_number}"
        if line.startswith(";"):
            text = line[1:].strip()
            if not text.isdecimal():
                raise ValueError(f"{where}: got {line!r}, expected ';' and the number of the level")
            number = int(text)
            if number in rows:
                raise ValueError(f"{where}: there is a level {number} already; numbers must differ")
            rows[number], headings[number] = [], where
        elif line and not rows:
            raise ValueError(f"{where}: got {line!r}, expected a heading such as '; 0' before a level")
        elif line:
            rows[number].append(line)
    if not rows:
        raise ValueError(f"{file}: no level in it; expected '; 0', then rows such as '#@$.#'")
    levels = {number: "\n".join(level) for number, level in rows.items()}
    for number, level in levels.items():
        if not level:
            raise ValueError(f"{headings[number]}: level {number} has no rows")
        try:
            parse_board(level)
        except ValueError as error:
            raise ValueError(f"{headings[number]}: level {number}: {error}") from None
    return MappingProxyType(levels)
