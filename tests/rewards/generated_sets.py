"""Right answers to questions of reasoning-gym, also where its generators give none."""

from __future__ import annotations

import json
import string
from collections import deque
from typing import Any

from roll.utils.reasoning_gym_sets import reference_answer

OPTIONS: dict[str, dict[str, Any]] = {
    "composite": {"datasets": [{"name": "chain_sum", "weight": 1, "config": {}}]},
    "rush_hour": {"max_moves": 3},
}
"""Options that a data set needs here; the others are made with their own."""
FORMS = ("{}", "{}\n\nThat is all.", "Thinking.\n<answer>\n{}\n</answer>", "**Final answer:** {}", "```\n{}\n```")
"""How a response may state an answer under the reward's default options."""
NONSENSE = ("I don't know.", "nan", "[1]", "[[]]", '{"a": 1}', "9e99999999")


def right_answer(entry: dict[str, Any]) -> str:
    """Return the generator's answer, else one made from its metadata."""
    metadata = entry["metadata"]
    if metadata["source_dataset"] == "graph_color":
        return json.dumps(metadata["possible_answer"], indent=1)  # keys become texts, over several lines
    if metadata["source_dataset"] == "boxnet":
        return json.dumps(list(_box_moves(metadata["initial_state"])), indent=1)
    if metadata["source_dataset"] == "rush_hour":
        return _car_moves(metadata["board_config"])
    answer = reference_answer(entry)
    assert answer is not None, metadata["source_dataset"]
    return answer


def _box_moves(squares: dict[str, list[str]]) -> Any:
    """Each box square by square to its target: first along the rows, then along the columns."""
    places = {item: tuple(map(float, key.split("_"))) for key, items in squares.items() for item in items}
    for box in sorted(item for item in places if item.startswith("box_")):
        target = box.replace("box_", "target_")
        (row, column), (last_row, last_column) = places[box], places[target]
        while (row, column) != (last_row, last_column):
            start = row, column
            if row != last_row:
                row += 1 if last_row > row else -1
            else:
                column += 1 if last_column > column else -1
            yield {f"Agent[{start[0]}, {start[1]}]": f"move({box}, square[{row}, {column}])"}
        yield {f"Agent[{row}, {column}]": f"move({box}, {target})"}


def _car_moves(start: str) -> str:
    """The fewest moves by which the red car leaves, found breadth first."""
    from reasoning_gym.games.rush_hour import Board

    # Questions and verifier name the cars anew, without gaps.
    cars = string.ascii_uppercase[: len({letter for letter in start if letter.isupper()})]
    waiting, visited = deque([""]), set()
    while waiting:
        moves = waiting.popleft()
        for step in (f"{car}{sign}1 " for car in cars for sign in "+-"):
            board = Board(start)
            board.perform_moves(moves + step)
            if board.solved:
                return (moves + step).strip()
            state = str([piece.position for piece in board._pieces])
            if state not in visited:
                visited.add(state)
                waiting.append(moves + step)
    raise AssertionError(f"{start} can't be solved")
