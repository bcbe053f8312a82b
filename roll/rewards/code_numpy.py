"""The part of numpy that tests of plain values use, for a sandbox that has no packages.

`allclose`, `isclose`, `array_equal` and `testing`'s assertions, on numbers and lists of numbers. As strict as numpy's,
but for shapes: nothing is broadcast, so one number isn't close to a list of that number. Anything else of numpy isn't
there and makes the tests broken ones.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable
from typing import Any


class _Array:
    """What nothing here is an instance of."""


class _Float64(float):
    """Likewise."""


class _Float32(float):
    """Likewise."""


def _pairs(actual: Any, desired: Any) -> list[tuple[Any, Any]]:
    """Return the numbers at the same places; raises `AssertionError` for other shapes, `TypeError` for no numbers."""
    if isinstance(desired, (list, tuple)):
        if not isinstance(actual, (list, tuple)) or len(actual) != len(desired):
            raise AssertionError("shapes mismatch")
        return [pair for one, other in zip(actual, desired, strict=True) for pair in _pairs(one, other)]
    if isinstance(actual, (list, tuple)):
        raise AssertionError("shapes mismatch")
    for value in (actual, desired):
        if not isinstance(value, (int, float, complex)):
            raise TypeError(f"isfinite isn't supported for {type(value).__name__}")
    return [(actual, desired)]


def _close(actual: Any, desired: Any, rtol: float, atol: float, equal_nan: bool) -> bool:
    if actual == desired:
        return True
    if actual != actual or desired != desired:
        return equal_nan and actual != actual and desired != desired
    try:
        difference, size = abs(actual - desired), abs(desired)
    except OverflowError:
        return False
    return bool(difference <= atol + rtol * size) and not math.isinf(size)


def _same(value: Any, wanted: Any) -> bool:
    return value == wanted or (value != value and wanted != wanted)


class _Functions:
    """What compares; `guesses` says whether the test runs on guesses now, and everything is true then."""

    def __init__(self, guesses: Callable[[], bool]) -> None:
        self.guesses = guesses

    def close(self, actual: Any, desired: Any, rtol: float, atol: float, equal_nan: bool) -> bool:
        return self.guesses() or all(_close(a, b, rtol, atol, equal_nan) for a, b in _pairs(actual, desired))

    def allclose(self, a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
        try:
            return self.close(a, b, rtol, atol, equal_nan)
        except AssertionError:
            return False

    def array_equal(self, a1: Any, a2: Any) -> bool:
        try:
            return self.guesses() or all(one == other for one, other in _pairs(a1, a2))
        except (AssertionError, TypeError):
            return bool(a1 == a2)

    def assert_allclose(
        self, actual: Any, desired: Any, rtol: float = 1e-7, atol: float = 0, equal_nan: bool = True, *_: Any, **__: Any
    ) -> None:
        if not self.close(actual, desired, rtol, atol, equal_nan):
            raise AssertionError(f"not equal to tolerance rtol={rtol}, atol={atol}")

    def assert_almost_equal(self, actual: Any, desired: Any, decimal: int = 7, *_: Any, **__: Any) -> None:
        if not self.close(actual, desired, 0.0, 1.5 * 10.0**-decimal, True):
            raise AssertionError(f"not almost equal to {decimal} decimals")

    def assert_equal(self, actual: Any, desired: Any, *_: Any, **__: Any) -> None:
        if not (self.guesses() or _same(actual, desired) or self.array_equal(actual, desired)):
            raise AssertionError("not equal")


def install_numpy(guesses: Callable[[], bool]) -> None:
    """Make `import numpy` find this."""
    own, module = _Functions(guesses), types.ModuleType("numpy")
    testing = types.ModuleType("numpy.testing")
    vars(module).update(
        testing=testing, allclose=own.allclose, isclose=own.allclose, array_equal=own.array_equal, ndarray=_Array,
        float64=_Float64, float32=_Float32, inf=math.inf, nan=math.nan, pi=math.pi, e=math.e,
    )  # fmt: skip
    vars(testing).update(
        assert_allclose=own.assert_allclose, assert_almost_equal=own.assert_almost_equal,
        assert_array_almost_equal=own.assert_almost_equal, assert_equal=own.assert_equal,
        assert_array_equal=own.assert_equal,
    )  # fmt: skip
    sys.modules["numpy"], sys.modules["numpy.testing"] = module, testing
