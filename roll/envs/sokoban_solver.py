"""Shortest solutions of Sokoban positions by breadth-first search, forwards from one or backwards from the solved one.

A layer holds all positions at the same number of moves, as a dict from the set of boxes to the set of cells where the
player may stand: one step of the search moves all these players at once. Sets are ints (see `sokoban_board`).
"""

from __future__ import annotations

from roll.envs.sokoban_board import ACTIONS, Board, parse_board

Layer = dict[int, int]


class SearchLimitError(RuntimeError):
    """The search was given up: whether there is a solution isn't known."""


def solve(grid: str, max_nodes: int = 1_000_000) -> list[str] | None:
    """Return the shortest solution in moves; None if there is none.

    Of several shortest ones always the same is returned. `max_nodes` bounds the work (a node is one set of boxes in one
    layer, some 3 microseconds); beyond it `SearchLimitError` is raised.
    """
    board = parse_board(grid)
    if board.boxes == board.targets:
        return []
    alive = alive_cells(board)
    if board.boxes & ~alive:
        return None
    layers: list[Layer] = [{board.boxes: 1 << board.player}]
    visited: Layer = dict(layers[0])
    nodes = 0
    while layers[-1]:
        nodes += len(layers[-1])
        if nodes > max_nodes:
            raise SearchLimitError(f"no solution in {len(layers) - 1} moves, nor found within max_nodes={max_nodes}")
        layers.append(_next_layer(board, layers[-1], visited, alive))
        if board.targets in layers[-1]:
            return _trace(board, layers)
    return None


def layers_before_solved(board: Board, depth: int | None, max_nodes: int) -> tuple[list[Layer], bool]:
    """Return positions by the length of their shortest solution, from 0 to `depth`; and whether that is all there are.

    Only walls and targets of `board` count. A layer that would take more than `max_nodes` in sum is left out, then the
    second value is False.
    """
    solved: Layer = {board.targets: board.floor & ~board.targets}
    layers, visited, nodes = [solved], dict(solved), 0
    while layers[-1] and (depth is None or len(layers) <= depth):
        nodes += len(layers[-1])
        if nodes > max_nodes:
            return layers, False
        layers.append(_previous_layer(board, layers[-1], visited))
    return layers, True


def alive_cells(board: Board) -> int:
    """Cells from which a lone box can be pushed to some target; a box on any other is lost."""
    alive = grown = board.targets
    while grown:
        reached = 0
        for left, right in board.shifts:  # pulled one cell further, where the player must have a cell to step back to
            behind = (board.floor << right) >> left
            reached |= ((grown << left) >> right) & board.floor & behind
        grown = reached & ~alive
        alive |= grown
    return alive


def reachable(board: Board, boxes: int, player: int) -> int:
    """Return the cells that the player gets to without a push."""
    free = board.floor & ~boxes
    stride = board.stride
    reached, grown = 0, 1 << player
    while grown:
        reached |= grown
        grown = (grown << 1 | grown >> 1 | grown << stride | grown >> stride) & free & ~reached
    return reached


def _next_layer(board: Board, layer: Layer, visited: Layer, alive: int) -> Layer:
    following: Layer = {}
    for boxes, players in layer.items():
        free = board.floor & ~boxes
        open_to_boxes = free & alive
        walked = 0
        for left, right in board.shifts:
            stepped = (players << left) >> right
            walked |= stepped
            pushed = stepped & boxes & ((open_to_boxes << right) >> left)
            while pushed:
                box = pushed & -pushed
                pushed ^= box
                _add(following, visited, boxes ^ box ^ ((box << left) >> right), box)
        _add(following, visited, boxes, walked & free)
    return following


def _previous_layer(board: Board, layer: Layer, visited: Layer) -> Layer:
    earlier: Layer = {}
    floor, shifts = board.floor, board.shifts
    for boxes, players in layer.items():
        free = floor & ~boxes
        walked = 0
        for left, right in shifts:
            walked |= (players << left) >> right
            # The player stepped this way to where it is now, and pushed the box that is one cell further.
            pulled = players & ((boxes << right) >> left)
            if pulled:  # seldom, so only then where it was free
                pulled &= (free << left) >> right
            while pulled:
                cell = pulled & -pulled
                pulled ^= cell
                _add(earlier, visited, boxes ^ ((cell << left) >> right) ^ cell, (cell << right) >> left)
        _add(earlier, visited, boxes, walked & free)
    return earlier


def _add(layer: Layer, visited: Layer, boxes: int, players: int) -> None:
    known = visited.get(boxes, 0)
    new = players & ~known
    if new:
        visited[boxes] = known | new
        layer[boxes] = layer.get(boxes, 0) | new


def _trace(board: Board, layers: list[Layer]) -> list[str]:
    boxes, players = board.targets, layers[-1][board.targets]
    player = players & -players
    moves: list[str] = []
    for layer in reversed(layers[:-1]):
        action, boxes, player = _move_from(layer, board, boxes, player)
        moves.append(action)
    return moves[::-1]


def _move_from(layer: Layer, board: Board, boxes: int, player: int) -> tuple[str, int, int]:
    """Return a move from a position of `layer` to this one, and the boxes and the player before it."""
    for action, (left, right) in zip(ACTIONS, board.shifts, strict=True):
        before = (player << right) >> left
        pushed = (player << left) >> right
        if layer.get(boxes, 0) & before:
            return action, boxes, before
        if boxes & pushed and layer.get(boxes ^ pushed ^ player, 0) & before:
            return action, boxes ^ pushed ^ player, before
    raise AssertionError("every position of a layer comes from one of the layer before")
