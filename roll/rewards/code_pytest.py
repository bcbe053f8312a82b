"""The part of pytest that files of tests use, for a sandbox that has no packages.

Functions `test*`, classes `Test*` and `unittest.TestCase`; `raises`, `approx`, `fail`, `skip`, `mark.parametrize`,
`mark.skip`, and fixtures of one test. Anything else of pytest isn't there and makes the file a broken one.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
import unittest
from collections.abc import Callable
from typing import Any


class Skipped(BaseException):
    """The test says that it doesn't apply."""


class _Raises:
    def __init__(self, expected: Any, match: str | None) -> None:
        self.expected, self.match, self.value = expected, match, None

    def __enter__(self) -> _Raises:
        return self

    def __exit__(self, kind: Any, error: Any, _: Any) -> bool:
        if error is None:
            guesses = sys.modules["pytest"].guesses
            if not guesses():
                raise AssertionError(f"did not raise {self.expected}")
            return False
        if not issubclass(kind, self.expected):
            return False
        if self.match is not None and not re.search(self.match, str(error)):
            raise AssertionError(f"{error!r} doesn't match {self.match!r}")
        self.value = error
        return True


def _raises(expected: Any, function: Any = None, *values: Any, match: str | None = None, **named: Any) -> Any:
    if function is None:
        return _Raises(expected, match)
    with _Raises(expected, match):
        function(*values, **named)
    return None


class _Approx:
    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None) -> None:
        self.expected, self.rel, self.abs = expected, rel, abs

    def __eq__(self, actual: object) -> Any:
        return self._same(self.expected, actual)

    __hash__ = None  # type: ignore[assignment]

    def _same(self, expected: Any, actual: Any) -> Any:
        if isinstance(expected, dict):
            return type(actual) is dict and expected.keys() == actual.keys() and all(
                self._same(expected[key], actual[key]) for key in expected
            )  # fmt: skip
        if isinstance(expected, (list, tuple)):
            return type(actual) is type(expected) and len(actual) == len(expected) and all(
                map(self._same, expected, actual)
            )  # fmt: skip
        if isinstance(actual, (int, float, complex)) and isinstance(expected, (int, float, complex)):
            if expected == actual:
                return True
            relative = 1e-6 if self.rel is None and self.abs is None else self.rel or 0.0
            absolute = 1e-12 if self.abs is None else self.abs
            return bool(abs(expected - actual) <= max(relative * abs(expected), absolute))
        return expected == actual


class _Mark:
    def parametrize(self, names: Any, values: Any, **_: Any) -> Callable[[Any], Any]:
        """Run the test once for each of the values."""
        keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        rows = [dict(zip(keys, (value,) if len(keys) == 1 else value, strict=True)) for value in values]

        def mark(function: Any) -> Any:
            old = getattr(function, "rows", [{}])
            function.rows = [{**one, **row} for one in old for row in rows]
            return function

        return mark

    def skip(self, *values: Any, **_: Any) -> Any:
        """Leave the test out."""

        def mark(function: Any) -> Any:
            function.left_out = True
            return function

        return mark(values[0]) if values and callable(values[0]) else mark

    def skipif(self, condition: Any, **_: Any) -> Any:
        """Leave the test out where a condition holds."""
        return self.skip() if condition else lambda function: function

    def __getattr__(self, name: str) -> Any:
        return lambda *values, **_: values[0] if values and callable(values[0]) else (lambda function: function)


def _fixture(*values: Any, **options: Any) -> Any:
    def mark(function: Any) -> Any:
        function.is_fixture = True
        function.automatic = options.get("autouse", False)
        return function

    return mark(values[0]) if values else mark


def _fail(reason: str = "", **_: Any) -> None:
    raise AssertionError(reason)


def _skip(reason: str = "", **_: Any) -> None:
    raise Skipped(reason)


def install(guesses: Callable[[], bool]) -> None:
    """Make `import pytest` find this. `guesses` says whether the test runs on guesses now."""
    module: Any = types.ModuleType("pytest")
    module.raises, module.approx, module.mark, module.fixture = _raises, _Approx, _Mark(), _fixture
    module.fail, module.skip, module.guesses = _fail, _skip, guesses
    sys.modules["pytest"] = module


def discovered_tests(space: dict[str, Any]) -> list[tuple[str, Callable[[], None]]]:
    """Return the tests of a file that has been executed, by name."""
    tests: list[tuple[str, Callable[[], None]]] = []
    # Functions of the file alone: what it imports from the program would be asked for the attribute, in a round more.
    functions = {name: value for name, value in space.items() if isinstance(value, types.FunctionType)}
    fixtures = {name: function for name, function in functions.items() if getattr(function, "is_fixture", False)}
    for name, value in space.items():
        if isinstance(value, types.FunctionType) and name.startswith("test"):
            tests += _variants(name, value, fixtures, lambda: None)
        elif isinstance(value, type) and issubclass(value, unittest.TestCase):
            tests += [(f"{name}::{own}", _case(value, own)) for own in dir(value) if own.startswith("test")]
        elif isinstance(value, type) and name.startswith("Test") and value.__module__ == "tests":
            for own in [own for own in vars(value) if own.startswith("test")]:
                tests += _variants(f"{name}::{own}", getattr(value, own), fixtures, value)
    return tests


def _variants(name: str, function: Any, fixtures: dict[str, Any], make: Any) -> list[tuple[str, Callable[[], None]]]:
    if getattr(function, "left_out", False):
        return []
    rows = getattr(function, "rows", [{}])
    bound = make is not None and isinstance(make, type)
    return [
        (f"{name}[{i}]" if len(rows) > 1 else name, _caller(function, row, fixtures, make if bound else None))
        for i, row in enumerate(rows)
    ]


def _caller(function: Any, row: dict[str, Any], fixtures: dict[str, Any], make: Any) -> Callable[[], None]:
    def call() -> None:
        endings: list[Any] = []
        made: dict[str, Any] = dict(row)

        def value_of(name: str) -> Any:
            if name not in made:
                made[name] = started(fixtures[name])
            return made[name]

        def started(fixture: Any) -> Any:
            result = fixture(**{name: value_of(name) for name in inspect.signature(fixture).parameters})
            if inspect.isgenerator(result):
                endings.append(result)
                return next(result)
            return result

        for name, fixture in fixtures.items():
            if fixture.automatic:
                value_of(name)
        first = [make()] if make else []
        if first and hasattr(first[0], "setup_method"):
            first[0].setup_method(*[function][: len(inspect.signature(first[0].setup_method).parameters)])
        names = list(inspect.signature(function).parameters)[len(first) :]
        function(*first, **{name: value_of(name) for name in names})
        for ending in reversed(endings):
            next(ending, None)

    return call


def _case(kind: type[unittest.TestCase], name: str) -> Callable[[], None]:
    def call() -> None:
        case = kind(name)
        kind.setUpClass()
        case.setUp()
        getattr(case, name)()
        case.tearDown()

    return call
