"""What runs the tests of a task in a sandbox of their own, where the program isn't.

A test calls stand-ins. Each use of one is an operation, numbered within its test: the answers that the program has
given so far are read in this order. Where they end, the test goes on with an `Unknown`, to find the operations that
will be asked for next; what it then concludes doesn't count. So a test is finished once it ran on answers alone.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import random
import sys
import types
from collections.abc import Callable
from typing import Any

from roll.rewards.code_program import take_output
from roll.rewards.code_values import decode, encode

MAX_OPERATIONS = 20_000
_MAX_GUESSES = 100_000
_ASSERT = "__roll_assert__"


class Stop(BaseException):
    """This test can't go on without an answer."""


class Dead(BaseException):
    """The program had ended before it gave this answer."""


class CheckerSession:
    """The operations of one test, and the answers to the first of them."""

    def __init__(self, recorded: list[Any], answers: list[Any]) -> None:
        self.recorded, self.answers = recorded, answers
        self.requests: list[Any] = []
        self.guessing = False
        self._guesses = 0

    def guess(self) -> None:
        """Count a use of what isn't known."""
        self.guessing = True
        self._guesses += 1
        if self._guesses > _MAX_GUESSES:
            raise Stop

    def perform(self, operation: str, values: list[Any], named: dict[str, Any] | None = None) -> Any:
        """Return the answer to an operation, or an `Unknown`; raises what the program raised."""
        request = [operation, [self._encode(v) for v in values], {k: self._encode(v) for k, v in (named or {}).items()}]
        index = len(self.requests)
        if index >= MAX_OPERATIONS:
            raise Stop
        if index < len(self.answers) and (self.guessing or self.recorded[index] != request):
            del self.answers[index:]  # given for another operation
        self.requests.append(request)
        if index >= len(self.answers):
            self.guessing = True
            return Unknown(self, index)
        answer = self.answers[index]
        if answer is None:
            raise Dead
        return self._read(answer, index, values)

    def _encode(self, value: Any) -> Any:
        def refer(held: Any) -> Any:
            if isinstance(held, (Ref, Unknown)):
                index = object.__getattribute__(held, "_index")
                if index is not None:
                    return ["$", index]
                raise Stop
            raise TypeError(f"a test gives the program a {type(held).__name__}, which can't cross as a plain value")

        return encode(value, refer)

    def _read(self, answer: Any, index: int, values: list[Any]) -> Any:
        kind, content = answer[0], answer[1]
        if kind == "raised":
            raise decode(content)
        if kind != "ok":
            raise ValueError("not an answer")
        if isinstance(content, list) and content[0] == "ref":
            return Ref(self, index, str(content[1]))
        result = decode(content)
        if result is None and len(answer) > 2:
            for position, new in answer[2]:
                _assign(values[position], decode(new))
        return result


def _assign(old: Any, new: Any) -> None:
    """Change a collection in place as the program has."""
    if type(old) is not type(new):
        return
    if isinstance(old, (list, bytearray)):
        old[:] = new
    elif isinstance(old, (dict, set)):
        old.clear()
        old.update(new)


class Ref:
    """Something that stays with the program. Equal to nothing else: what the program says of itself isn't believed."""

    def __init__(self, session: CheckerSession, index: int, kind: str) -> None:
        object.__setattr__(self, "_session", session)
        object.__setattr__(self, "_index", index)
        object.__setattr__(self, "_kind", kind)

    def _do(self, operation: str, *values: Any, **named: Any) -> Any:
        return object.__getattribute__(self, "_session").perform(operation, [self, *values], named)

    def __call__(self, *values: Any, **named: Any) -> Any:
        return self._do("call", *values, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__"):
            raise AttributeError(name)
        return self._do("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._do("set", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._do("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._do("set_item", key, value)

    def __contains__(self, item: Any) -> bool:
        return _bool(self._do("in", item))

    def __bool__(self) -> bool:
        return _bool(self._do("bool"))

    def __len__(self) -> int:
        return int(self._do("len"))

    def __iter__(self) -> Any:
        return iter(self._do("iter"))

    def __next__(self) -> Any:
        return self._do("next")

    def __str__(self) -> str:
        return _text(self._do("str"))

    def __repr__(self) -> str:
        return _text(self._do("repr"))


def _bool(value: Any) -> bool:
    return value is True or isinstance(value, Unknown)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


class Unknown:
    """A result that isn't there yet. It agrees with everything, so that the test goes on."""

    def __init__(
        self, session: CheckerSession, index: int | None, attribute: tuple[Unknown, str] | None = None
    ) -> None:
        object.__setattr__(self, "_session", session)
        object.__setattr__(self, "_index", index)
        object.__setattr__(self, "_attribute", attribute)
        session.guess()

    def __call__(self, *values: Any, **named: Any) -> Any:
        session, index = object.__getattribute__(self, "_session"), object.__getattribute__(self, "_index")
        return Unknown(session, None) if index is None else session.perform("call", [self, *values], named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unknown(object.__getattribute__(self, "_session"), None, (self, name))

    def __setattr__(self, name: str, value: Any) -> None:
        held = _asked_for(self)
        object.__getattribute__(held, "_session").perform("set", [held, name, value])

    def __setitem__(self, key: Any, value: Any) -> None:
        raise Stop

    def __bool__(self) -> bool:
        object.__getattribute__(self, "_session").guess()
        return True

    def __hash__(self) -> int:
        return 0


def _asked_for(unknown: Unknown) -> Unknown:
    """Return an `Unknown` that is the result of an operation: an attribute that was only read is asked for now."""
    attribute = object.__getattribute__(unknown, "_attribute")
    if object.__getattribute__(unknown, "_index") is not None:
        return unknown
    if attribute is None:
        raise Stop
    result = object.__getattribute__(unknown, "_session").perform("get", [_asked_for(attribute[0]), attribute[1]])
    assert isinstance(result, Unknown)
    return result


def _vague(self: Unknown, *_: Any) -> Any:
    return Unknown(object.__getattribute__(self, "_session"), None)


def _plainly(result: Any) -> Callable[..., Any]:
    def method(self: Unknown, *_: Any) -> Any:
        object.__getattribute__(self, "_session").guess()
        return iter(()) if result is iter else result

    return method


_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow and rand or ror xor rxor lshift "
    "rlshift rshift rrshift neg pos abs invert eq ne lt le gt ge getitem round matmul next enter"
)
for _name in _OPERATORS.split():
    setattr(Unknown, f"__{_name}__", _vague)
for _name, _result in {
    "int": 0, "float": 0.0, "index": 0, "len": 0, "iter": iter, "contains": True, "complex": 0j, "str": "", "repr": "",
    "format": "", "exit": False,
}.items():  # fmt: skip
    setattr(Unknown, f"__{_name}__", _plainly(_result))


class _Builtins(dict[str, Any]):
    """Where a name is looked for last: a module of the standard library, else something of the program."""

    session: CheckerSession

    def __missing__(self, name: str) -> Any:
        if name.startswith("__"):
            raise KeyError(name)
        if name in sys.stdlib_module_names:
            return importlib.import_module(name)
        return self.session.perform("name", [name])


class _Program(types.ModuleType):
    """What `import solution` finds."""

    session: CheckerSession

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.session.perform("name", [name])


class _Asserts(ast.NodeTransformer):
    def visit(self, node: ast.AST) -> ast.AST:
        """Visit statements alone: no `assert` stands in an expression, and inputs are lists of a million numbers."""
        changed: ast.AST = node if isinstance(node, ast.expr) else super().visit(node)
        return changed

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        call = ast.Call(ast.Name(_ASSERT, ast.Load()), [node.test], [])
        return ast.fix_missing_locations(ast.copy_location(ast.Expr(call), node))


def compile_test(source: str, name: str) -> Any:
    """Compile a test whose `assert` statements end nothing while it runs on guesses."""
    tree = ast.parse(source)
    _Asserts().visit(tree)
    return compile(tree, name, "exec")


class Checker:
    """The tests of one task."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked = asked
        self.setup = compile_test(asked["setup"], "setup")
        self.tests = [compile_test(text, f"test {i + 1}") for i, text in enumerate(asked["tests"])]

    def space(self, session: CheckerSession) -> dict[str, Any]:
        """Return the names of a test, before its own code."""

        def check(value: Any) -> None:
            if not session.guessing and not value:
                raise AssertionError

        if self.asked["discover"]:
            install(lambda: session.guessing)  # type: ignore[name-defined]  # noqa: F821 - of code_pytest.py
        if self.asked["numpy"]:
            install_numpy(lambda: session.guessing)  # type: ignore[name-defined]  # noqa: F821 - of code_numpy.py
        builtins_ = _Builtins(vars(builtins))
        builtins_.session = session
        builtins_[_ASSERT] = check
        for name in self.asked["modules"]:
            module = _Program(name)
            module.session = session
            sys.modules[name] = module
        random.seed(0)
        return {"__name__": "tests", "__builtins__": builtins_}

    def names(self) -> list[str]:
        """Return what the tests are called."""
        if not self.asked["discover"]:
            return [f"test {i + 1}" for i in range(len(self.tests))]
        space = self.space(CheckerSession([], []))
        exec(self.setup, space)
        return [name for name, _ in discovered_tests(space)]  # type: ignore[name-defined]  # noqa: F821

    def run(self, number: int, session: CheckerSession) -> None:
        """Run one test; raises what it raises."""
        space = self.space(session)
        exec(self.setup, space)
        for name in self.asked["program_names"]:
            space[name] = session.perform("name", [name])
        if self.asked["discover"]:
            discovered_tests(space)[number][1]()  # type: ignore[name-defined]  # noqa: F821
        else:
            exec(self.tests[number], space)

    def result(self, number: int, recorded: list[Any], answers: list[Any]) -> dict[str, Any]:
        """Return how a test ended: `passed`, `failed` or `open`, with its operations."""
        session = CheckerSession(recorded, answers)
        why, state = "", "passed"
        try:
            self.run(number, session)
        except BaseException as error:  # noqa: BLE001 - a test fails by raising
            if type(error).__name__ == "Skipped":
                state = "skipped"
            else:
                state, why = "failed", f"{type(error).__name__}: {error}"[:500]
        if session.guessing:
            state = "open"
        return {"test": number, "state": state, "requests": session.requests, "why": why}


def check() -> None:
    """Run the tests that are asked for and write what came of them."""
    ours = take_output()
    asked = json.loads(sys.stdin.buffer.read())
    try:
        checker = Checker(asked)
        names = checker.names()
        first: list[Any] = [[n, [], []] for n in range(len(names))]
        rounds = first if asked["rounds"] is None else asked["rounds"]
        results = [checker.result(number, recorded, answers) for number, recorded, answers in rounds]
        ours.write(json.dumps({"names": names, "results": results}))
    except BaseException as error:  # noqa: BLE001 - the tests can't be run at all
        ours.write(json.dumps({"broken": f"{type(error).__name__}: {error}"[:500]}))
    ours.flush()


if __name__ == "__main__":
    check()
    os._exit(0)
