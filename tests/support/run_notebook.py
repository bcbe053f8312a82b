"""Run the code cells of a notebook in this process, and write what they print and give into it.

    python tests/support/run_notebook.py NOTEBOOK [OUTPUT]    without OUTPUT nothing is written

A notebook server isn't needed; like there, a loop of asyncio runs while a cell does.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any


def outputs_of(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Run a cell; what it prints, and its last expression."""
    tree, printed, last = ast.parse(source), io.StringIO(), None
    tail = ast.Expression(tree.body.pop().value) if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"<cell {number}>", "exec"), names)
        if tail is not None:
            last = eval(compile(tail, f"<cell {number}>", "eval"), names)
    found: list[dict[str, Any]] = []
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        found.append({"output_type": "stream", "name": "stdout", "text": lines})
    if last is not None:
        data = {"text/plain": [re.sub(r"(Posix|Windows)Path\('([^']*)'\)", r"\1Path('\2')", repr(last))]}
        found.append({"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data})
    return found


async def run(book: dict[str, Any]) -> None:
    """Run all cells, and put their outputs into the notebook."""
    import types

    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    for number, cell in enumerate((c for c in book["cells"] if c["cell_type"] == "code"), 1):
        cell["outputs"] = outputs_of("".join(cell["source"]), vars(module), number)
        cell["execution_count"] = number


if __name__ == "__main__":
    file = Path(sys.argv[1]).resolve()
    target = Path(sys.argv[2]).resolve() if len(sys.argv) > 2 else None
    content = json.loads(file.read_text("utf-8"))
    asyncio.run(run(content))
    if target is not None:
        target.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
