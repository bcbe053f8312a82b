"""What runs in the sandbox around the code of a policy: one piece after the other in one namespace.

Standard input has a line of JSON for each: `{"code": ..., "mark": ...}`. What a piece prints, and the value of its
last expression, goes to standard output; the mark, on a line of its own, follows. Nothing here is protected from the
code: it can only spoil what its own policy is shown.
"""

from __future__ import annotations

import ast
import io
import json
import linecache
import sys
import traceback
from typing import Any


def run_piece(code: str, name: str, space: dict[str, Any]) -> None:
    """Run one piece as a notebook does; print what it raises, without our frames."""
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    try:
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), space)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), space)
            if value is not None:
                sys.stdout.write(f"{value!r}\n")
    except SystemExit:
        pass
    except BaseException as error:  # noqa: BLE001 - whatever the code raises is what it gave
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != name:
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames, limit=-5, chain=False)


def serve() -> None:
    """Run pieces until there are no more."""
    asked = sys.stdin
    sys.stdin = io.StringIO("")
    sys.stderr = sys.stdout
    space: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    for number, line in enumerate(asked, 1):
        request = json.loads(line)
        run_piece(request["code"], f"<call {number}>", space)
        sys.stdout.flush()
        sys.__stdout__.write(f"\n{request['mark']}\n")  # type: ignore[union-attr]
        sys.__stdout__.flush()  # type: ignore[union-attr]


if __name__ == "__main__":
    serve()
