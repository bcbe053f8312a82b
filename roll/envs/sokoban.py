"""Sokoban: push every box onto a target. Boxes can be pushed but not pulled, so a wrong push may be final."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal

from roll.envs.base import Env, InvalidAction, Observation, ResetNeeded, StepResult
from roll.envs.held_out import Part, check_part, room_of_part
from roll.envs.pixels import Pixels
from roll.envs.sokoban_board import ACTIONS, parse_board
from roll.envs.sokoban_pixels import draw
from roll.envs.sokoban_rooms import RoomSettings, generate_room, load_levels
from roll.envs.sokoban_solver import SearchLimitError, solve
from roll.utils.seeding import stable_hash

DEFAULT_ROOM = (6, 6)

# In the order of sokoban_board's signs. The symbols are those that RAGEN (arXiv:2504.20073) shows its policies.
SIGNS = "# .$*@+"
SYMBOLS = dict(zip(SIGNS, ("#", "_", "O", "X", "√", "P", "S"), strict=True))
WORDS = dict(zip(SIGNS, ("wall", "floor", "target", "box", "box_on_target", "player", "player_on_target"), strict=True))

GOAL = """You are solving a Sokoban puzzle: push every box onto a target.
You push a box by walking into it; it moves one cell in the same direction. You can't pull boxes, can't push two boxes \
at once, and nothing moves into a wall.
"""
MOVES = "Actions: Up, Down, Left, Right. Each moves you by one cell; a move that isn't possible changes nothing."

WALL, FLOOR, TARGET, BOX, BOX_ON_TARGET, PLAYER, PLAYER_ON_TARGET = (ord(sign) for sign in SIGNS)
LEFT_BEHIND = {PLAYER: FLOOR, PLAYER_ON_TARGET: TARGET}
STEPPED_ON = {FLOOR: PLAYER, TARGET: PLAYER_ON_TARGET, BOX: PLAYER, BOX_ON_TARGET: PLAYER_ON_TARGET}
_SYMBOLS_SHOWN = {ord("\n"): "\n"} | {ord(sign): f"{name} " for sign, name in SYMBOLS.items()}
_WORDS_SHOWN = {ord("\n"): "\n"} | {ord(sign): f"{name} " for sign, name in WORDS.items()}
_BARE = str.maketrans("$*@+", " . .")
PUSHED_TO = {FLOOR: BOX, TARGET: BOX_ON_TARGET}


class Sokoban(Env):
    """Push every box onto a target.

    Rooms come from the seed alone: generated (always solvable, never solved at the start), or a level of a file.

    Rewards: every action `reward_step`; a box pushed onto a target `reward_box`, off one `reward_box_off`; the last box
    `reward_done` on top. From one target onto another changes nothing. The episode terminates when all boxes are on
    targets. Metrics: `moved` (the action changed something), `boxes_on_target` (1 for a box onto a target, -1 off one),
    and `success` in the last step.

    `state` is the room in the signs of level files (`sokoban_board`), whatever is shown.

    Args:
        dim_room: (height, width) with the outer wall, or one number for both.
        num_boxes: boxes, and targets.
        min_solution, max_solution: bounds of the shortest solution's length in moves. A `min_solution` above some 20 in
            rooms above 8x8 with several boxes takes up to a second per room, since only a search can tell.
        level_file: file of levels in the format of Boxoban, instead of generated rooms; the seed picks one.
        level_indices: numbers of the levels to pick from. None: all of the file.
        part: `held_out` takes the fifth of all rooms, by their walls and targets, that `train` leaves out: with one
            environment for training and one for validation the policy is validated in rooms that it has never met.
        observation: `symbols` (`# _ O X √ P S`), `text` (words for the cells), or `coordinates` (rows and columns of
            player, boxes, targets and inner walls).
    """

    actions = ACTIONS

    def __init__(
        self,
        *,
        dim_room: int | Sequence[int] = DEFAULT_ROOM,
        num_boxes: int = 1,
        min_solution: int = 1,
        max_solution: int | None = None,
        level_file: str | None = None,
        level_indices: Sequence[int] | None = None,
        part: Part = "all",
        observation: Literal["symbols", "text", "coordinates"] = "symbols",
        reward_step: float = -0.1,
        reward_box: float = 1.0,
        reward_box_off: float = -1.0,
        reward_done: float = 10.0,
    ) -> None:
        if observation not in ("symbols", "text", "coordinates"):
            raise ValueError(f"observation: got {observation!r}, expected 'symbols', 'text' or 'coordinates'")
        check_part(part)
        if part != "all" and level_file is not None:
            raise ValueError(f"part: got {part!r} with a level_file; choose its levels with level_indices")
        self._part: Part = part
        self._room = _room_settings(dim_room, num_boxes, min_solution, max_solution)
        self._levels = _levels(level_file, level_indices, self._room)
        self.one_episode = len(self._levels) == 1
        self._shown_as = observation
        self._names = _WORDS_SHOWN if observation == "text" else _SYMBOLS_SHOWN
        rewards = {
            "reward_step": reward_step,
            "reward_box": reward_box,
            "reward_box_off": reward_box_off,
            "reward_done": reward_done,
        }
        for name, value in rewards.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"{name}: got {value!r}, expected a finite number")
        self._reward_step, self._reward_done = reward_step, reward_done
        self._box_rewards = {1: reward_box, 0: 0.0, -1: reward_box_off}
        self.instructions = _instructions(observation)
        self._offsets: dict[str, int] = {}  # of the actions; empty without an episode
        self._cells = bytearray()  # the signs, rows with a newline between them
        self._shown: list[str] = []  # names of the cells, each with what follows it
        self._player = self._num_boxes = self._num_done = 0

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        if options:
            raise ValueError(f"Sokoban has no options, got {', '.join(sorted(options))}: leave them out")
        if self._levels:
            text = self._levels[stable_hash("sokoban-level", seed) % len(self._levels)]
        else:
            text = room_of_part(self._part, seed, lambda drawn: generate_room(self._room, drawn), _layout)
        return self.start_at(text)

    def start_at(self, grid: str) -> Observation:
        """Start in this position, given in the signs of level files."""
        board = parse_board(grid)
        self._cells = bytearray(grid, "ascii")
        self._offsets = dict(zip(ACTIONS, board.offsets, strict=True))
        self._player = board.player
        self._num_boxes = board.boxes.bit_count()
        self._num_done = (board.boxes & board.targets).bit_count()
        self._shown = [self._names[sign] for sign in self._cells]
        for row_end in range(board.width - 1, len(grid), board.stride):
            self._shown[row_end] = self._names[WALL].rstrip()
        return self._observe()

    def step(self, action: str) -> StepResult:
        offset = self._offsets.get(action)
        if offset is None:
            raise self._not_an_action(action)
        cells, player = self._cells, self._player
        ahead = player + offset
        sign = cells[ahead]
        reward, moved, gained = self._reward_step, 1, 0
        if sign in (FLOOR, TARGET):
            self._walk_to(ahead)
        elif sign != WALL and (pushed_to := PUSHED_TO.get(cells[ahead + offset])) is not None:
            self._put(ahead + offset, pushed_to)
            self._walk_to(ahead)
            gained = (pushed_to == BOX_ON_TARGET) - (sign == BOX_ON_TARGET)
            self._num_done += gained
            reward += self._box_rewards[gained]
        else:
            moved = 0
        if self._num_done < self._num_boxes:
            metrics = {"moved": moved, "boxes_on_target": gained}
            return StepResult(reward=reward, terminated=False, observation=self._observe(), metrics=metrics)
        self._offsets = {}
        metrics = {"moved": moved, "boxes_on_target": gained, "success": 1}
        return StepResult(reward=reward + self._reward_done, terminated=True, metrics=metrics)

    def render(self) -> Pixels:
        return draw(self.grid)

    def solution(self, max_actions: int) -> Sequence[str] | None:  # noqa: ARG002 - it is the same with any time
        """Return the shortest one, by search; None where there is none, or finding it would take seconds."""
        if not self._offsets:
            return None
        try:
            return solve(self.grid)
        except SearchLimitError:
            return None

    @property
    def grid(self) -> str:
        """Return the room in the signs of level files; `sokoban_solver.solve` takes it."""
        return self._cells.decode("ascii")

    def _observe(self) -> Observation:
        if self._shown_as == "coordinates":
            return Observation.of(_coordinates(self.grid), self.grid)
        return Observation.of("".join(self._shown), self._cells.decode("ascii"))

    def _walk_to(self, cell: int) -> None:
        self._put(self._player, LEFT_BEHIND[self._cells[self._player]])
        self._put(cell, STEPPED_ON[self._cells[cell]])
        self._player = cell

    def _put(self, cell: int, sign: int) -> None:
        self._cells[cell] = sign
        self._shown[cell] = self._names[sign]  # and a blank: a wall always follows in the row

    def _not_an_action(self, action: str) -> Exception:
        if not self._offsets:
            return ResetNeeded("step without an episode: call reset first, and again after the last step")
        return InvalidAction(f"got {action!r}, expected one of {', '.join(ACTIONS)}")


@cache
def _instructions(observation: str) -> str:
    if observation == "coordinates":
        return f"{GOAL}Positions are given as (row, column); row 1 is the top, column 1 the left.\n{MOVES}"
    names = WORDS if observation == "text" else SYMBOLS
    meanings = ", ".join(f"{names[sign]} {word.replace('_', ' ')}" for sign, word in WORDS.items())
    legend = "You see the room as rows of cells." if observation == "text" else f"The symbols: {meanings}."
    return f"{GOAL}{legend}\n{MOVES}"


def _coordinates(grid: str) -> str:
    rows = grid.split("\n")
    cells: dict[str, list[str]] = {"@+": [], "$*": [], ".*+": [], "#": []}
    for row, signs in enumerate(rows[1:-1], start=1):
        for column, sign in enumerate(signs[1:-1], start=1):
            for kind, of_kind in cells.items():
                if sign in kind:
                    of_kind.append(f"({row}, {column})")
    player, boxes, targets, walls = (" ".join(of_kind) or "none" for of_kind in cells.values())
    size = f"{len(rows) - 2} rows, {len(rows[0]) - 2} columns, walls around them"
    return f"Room: {size}\nInner walls: {walls}\nTargets: {targets}\nBoxes: {boxes}\nYou: {player}"


def _checked_integer(name: str, value: object, at_least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{name}: got {value!r}, expected a whole number of at least {at_least}")
    return value


def _layout(room: str) -> str:
    """Walls and targets, which rooms with another player or other boxes may share."""
    return room.translate(_BARE)


def _room_settings(
    dim_room: int | Sequence[int], num_boxes: int, min_solution: int, max_solution: int | None
) -> RoomSettings:
    if isinstance(dim_room, str) or (isinstance(dim_room, Sequence) and len(dim_room) != 2):
        raise ValueError(f"dim_room: got {dim_room!r}, expected one number, or two: [height, width]")
    sides = tuple(dim_room) if isinstance(dim_room, Sequence) else (dim_room, dim_room)
    height, width = (_checked_integer("dim_room", side, 3) for side in sides)
    _checked_integer("num_boxes", num_boxes, 1)
    inner, needed = (height - 2) * (width - 2), num_boxes + 2
    if inner < needed or max(height, width) < 5:
        raise ValueError(
            f"dim_room: got ({height}, {width}), which has {inner} cells inside the wall; {num_boxes} box(es) need "
            f"{needed} or more, and one side at least 5: use a larger dim_room or fewer boxes"
        )
    _checked_integer("min_solution", min_solution, 1)
    if max_solution is not None and _checked_integer("max_solution", max_solution, 1) < min_solution:
        raise ValueError(f"max_solution: got {max_solution}, expected at least min_solution={min_solution}")
    return RoomSettings(height, width, num_boxes, min_solution, max_solution)


def _levels(file: str | None, indices: Sequence[int] | None, room: RoomSettings) -> tuple[str, ...]:
    """Return the levels to pick from; none without a file."""
    if file is None:
        if indices is not None:
            raise ValueError("level_indices: got some without a level_file; set level_file or leave level_indices out")
        return ()
    if room != RoomSettings(*DEFAULT_ROOM, num_boxes=1):
        raise ValueError(
            "level_file: levels have their own sizes and boxes; leave out dim_room, num_boxes, min_solution and "
            "max_solution, or level_file"
        )
    levels = load_levels(file)
    chosen = list(levels) if indices is None else list(indices)
    missing = [number for number in chosen if number not in levels]
    if missing or not chosen:
        what = f"no level {missing[0]!r} in {file}" if missing else "no levels"
        raise ValueError(f"level_indices: {what}; the file has {min(levels)} to {max(levels)}")
    return tuple(levels[number] for number in chosen)
