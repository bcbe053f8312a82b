"""Messages say what is wrong in a sentence: "expected nothing" and "expected another value" are none."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from roll.configs.errors import Violation, no_effect, problem

CONFIGS = Path(__file__).parents[2] / "roll" / "configs"


@pytest.mark.parametrize("file", sorted(CONFIGS.rglob("*.py")), ids=lambda path: path.stem)
def test_no_message_expects_nothing_or_another_value(file):
    """Of every text that begins a message: the second argument of a `Violation`, and what is called `expected`."""
    begun = []
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Violation":
            begun += node.args[1:2]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "_wrong":
            begun += node.args[2:3]
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "expected":
            begun.append(node.value)
    texts = [ast.unparse(node).lstrip("f('\"") for node in begun]
    assert not [text for text in texts if text.startswith(("nothing", "another ", "other "))]


def test_a_problem_stands_for_itself_and_is_followed_by_value_and_fix():
    full = problem("a.b", "there is no room", "make some", 3)
    assert str(full) == "a.b: there is no room (got 3)\n      fix: make some"
    idle = no_effect("a", ", because b is off")
    assert str(idle) == "a: this key has no effect, because b is off\n      fix: remove it"
    assert str(Violation("a", "a number", value="x")) == "a: got 'x', expected a number"
