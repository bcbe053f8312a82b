"""Finding the program in a response."""

from __future__ import annotations

import ast
import re
from typing import Literal

Extract = Literal["auto", "last_block", "first_block", "whole"]

MAX_CHARS = 100_000
_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
_NAMES = ("python", "python3", "py", "")
_END = re.compile(r"\n(?:def |class |if __name__|print\(|assert |#|```|@)")


def extract_program(response: str, extract: Extract) -> str | None:
    """Return the program of a response, or None where it has none.

    `last_block` and `first_block`: of the blocks fenced as Python (or without a language). `whole`: the response.
    `auto`: the last block, else the response if it is Python. What thinks before `</think>` isn't looked at.
    """
    if extract not in ("auto", "last_block", "first_block", "whole"):
        raise ValueError(f"code: extract must be auto, last_block, first_block or whole, got {extract!r}")
    if len(response) > MAX_CHARS:
        response = response[-MAX_CHARS:] if extract != "whole" else ""
    response = response.rpartition("</think>")[2]
    if extract == "whole":
        return response if response.strip() else None
    blocks = [text for language, text in _FENCE.findall(response) if language.lower() in _NAMES]
    if blocks:
        return str(blocks[0 if extract == "first_block" else -1])
    return response if extract == "auto" and response.strip() and is_python(response) else None


def is_python(text: str) -> bool:
    """Return whether a text is Python."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def complete(prompt: str, entry_point: str, response: str, program: str | None) -> str | None:
    """Return the whole program: what was extracted if it defines the function, else the prompt with the response.

    A completion ends where something else begins at the margin.
    """
    if program is not None and _defines(program, entry_point):
        return f"{prompt}\n\n{program}"
    rest = program if program is not None and "```" in response else response.rpartition("</think>")[2]
    cut = _END.search(rest)
    completed = prompt + (rest[: cut.start()] if cut else rest)
    return completed if rest.strip() and is_python(completed) else None


def _defines(program: str, name: str) -> bool:
    if not is_python(program):
        return False
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in ast.parse(program).body:
        if isinstance(node, kinds) and node.name == name:
            return True
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return True
    return False
