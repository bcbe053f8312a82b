"""What runs in the sandbox around a program of the model: it makes the calls that the tests ask for.

Standard input holds the program and, for each test, the operations: calls, attributes, items. Each result is written as
a line of JSON to the standard output that the program doesn't have. Nothing here is protected from the program, and
nothing needs to be: a result is only what the program says, and what it should be isn't known here.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import sys
import types
from typing import Any

from roll.rewards.code_values import CannotCross, decode, encode, encode_error


def take_output() -> Any:
    """Return standard output for ourselves; what is printed from now on goes nowhere."""
    ours = os.fdopen(os.dup(1), "w", encoding="utf-8")
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
    except OSError:
        nowhere = 2
    os.dup2(nowhere, 1)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="replace", closefd=False)
    return ours


def _perform(operation: str, values: list[Any], named: dict[str, Any], space: dict[str, Any]) -> Any:
    first = values[0]
    if operation == "name":
        if first in space:
            return space[first]
        return getattr(builtins, first) if hasattr(builtins, first) else _missing(first)
    if operation == "call":
        return first(*values[1:], **named)
    if operation == "get":
        return getattr(first, values[1])
    if operation == "set":
        return setattr(first, values[1], values[2])
    if operation == "item":
        return first[values[1]]
    if operation == "set_item":
        first[values[1]] = values[2]
        return None
    simple: dict[str, Any] = {"len": len, "iter": iter, "str": str, "repr": repr, "bool": bool, "next": next}
    return values[1] in first if operation == "in" else simple[operation](first)


def _missing(name: str) -> Any:
    raise NameError(f"name {name!r} is not defined")


def _answer(request: list[Any], results: list[Any], space: dict[str, Any]) -> tuple[Any, Any]:
    """Return the result of one operation and its encoding."""

    def resolve(reference: list[Any]) -> Any:
        if reference[0] != "$":
            raise ValueError("not an encoded value")
        return results[reference[1]]

    def refer(value: Any) -> Any:
        if value is result:
            return ["ref", type(value).__name__]
        raise CannotCross(f"a value of type {type(value).__name__} inside of another")

    operation, values, named = request
    result: Any = None
    try:
        arguments = [decode(value, resolve) for value in values]
        result = _perform(operation, arguments, {k: decode(v, resolve) for k, v in named.items()}, space)
        answer = ["ok", encode(result, refer)]
        if operation == "call" and result is None:  # it may have changed what it was given, in place
            changed = [[i, new] for i, new in enumerate(map(_plain, arguments)) if i and new and new != values[i]]
            answer = [*answer, changed]
        return result, answer
    except RecursionError as error:
        return None, ["raised", encode_error(RecursionError(str(error)))]
    except BaseException as error:  # noqa: BLE001 - whatever the program raises is its answer
        return None, ["raised", encode_error(error)]


def _plain(value: Any) -> Any:
    try:
        return encode(value) if isinstance(value, (list, dict, set, bytearray)) else None
    except ValueError:
        return None


def run_program() -> None:
    """Load the program, make the calls, write the results."""
    ours = take_output()
    asked = json.loads(sys.stdin.buffer.read())
    sys.stdin = io.StringIO("")
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    try:
        for source in (asked["before"], asked["program"]):
            exec(compile(source, "solution.py", "exec"), module.__dict__)
    except BaseException as error:  # noqa: BLE001 - whatever the program raises
        ours.write(json.dumps(["load", encode_error(error)]) + "\n")
        ours.flush()
        return
    ours.write('["loaded"]\n')
    ours.flush()
    for number, requests in asked["tests"]:
        results: list[Any] = []
        for index, request in enumerate(requests):
            result, answer = _answer(request, results, module.__dict__)
            results.append(result)
            ours.write(json.dumps([number, index, answer]) + "\n")
            ours.flush()


if __name__ == "__main__":
    run_program()
    os._exit(0)  # threads and exit functions of the program have no say
