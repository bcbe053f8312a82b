"""A toy task with two tools, for agents of any framework: numbers in boxes.

    What is red plus 4?      look(box="red") -> 7      add(a=7, b=4) -> 11      11

Standard library alone, so that it can be imported under any interpreter. `toy_model.py` makes the model that learns it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

BOXES = ("red", "blue", "green", "black", "white", "pink", "gold", "grey")
INSTRUCTIONS = "Use the tools."
LOOK = {"type": "object", "properties": {"box": {"type": "string", "description": "its colour"}}, "required": ["box"]}
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "description": "one"}, "b": {"type": "integer", "description": "other"}},
    "required": ["a", "b"],
}
TOOLS = {"look": ("Number in a box", LOOK), "add": ("Sum of two numbers", ADD)}
"""Description and JSON schema by name."""


class Boxes:
    """One task with its tools. Everything follows from the seed.

    Args:
        task: as agents are told it: a mapping with a `seed`.
    """

    def __init__(self, task: Mapping[str, Any]) -> None:
        rng = random.Random(task["seed"])
        self._numbers = {box: rng.randint(1, 9) for box in BOXES}
        self.box, self.more = rng.choice(BOXES), rng.randint(1, 9)

    @property
    def question(self) -> str:
        """Return what the user asks."""
        return f"What is {self.box} plus {self.more}?"

    @property
    def answer(self) -> int:
        """Return the right answer."""
        return self._numbers[self.box] + self.more

    def look(self, box: str) -> int:
        """Return the number in a box; raises `KeyError` for one that there isn't."""
        return self._numbers[box]

    def add(self, a: int, b: int) -> int:
        """Return the sum."""
        return int(a) + int(b)

    def call(self, name: str, arguments: Any) -> str:
        """Return what a tool replies, to whatever the policy has written."""
        try:
            if name not in TOOLS:
                return f"error: no tool {str(name)[:20]}"
            return str(getattr(self, name)(**arguments))
        except (TypeError, ValueError, KeyError):
            return "error: wrong arguments"

    def score(self, answer: object) -> dict[str, Any]:
        """Return the score of a final answer, a text or a number: 1 if its only number is the right one."""
        numbers = re.findall(r"-?\d+", str(answer or ""))
        right = len(numbers) == 1 and numbers[0] == str(self.answer)
        return {"reward": float(right), "success": right}
