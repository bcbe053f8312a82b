"""The value of an expression: exact where it is rational, else to 60 digits, with its letters at sample points."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from roll.rewards.maths.nodes import Node

DIGITS = 60
_MAX_BITS = 50_000
"""Of an exact number: `2^{10000}` is computed, `2^{1000000}` isn't."""
_MAX_MAGNITUDE = 100_000
"""Bits of the exponent's value of an inexact number; more would take memory in proportion."""
_MAX_SPECIAL = 1000
"""What special functions take, whose time grows with their argument."""

_LOCAL = threading.local()


class TooHard(Exception):
    """An expression whose value takes more than is computed for an answer."""


class Undefined(ArithmeticError):
    """An expression that has no value at this point."""


def context() -> Any:
    """Return this thread's arithmetic: functions of mpmath change its precision for a while."""
    if not hasattr(_LOCAL, "context"):
        from mpmath.ctx_mp import MPContext

        _LOCAL.context = MPContext()
        _LOCAL.context.dps = DIGITS
    return _LOCAL.context


def exact(node: Node) -> Fraction | None:
    """Return the rational number that an expression is, or None if it isn't built by rational operations alone.

    Raises:
        TooHard: it has more than 50,000 bits.
        Undefined: it divides by zero.
    """
    op, args = node.op, node.args
    if op == "number":
        return node.value[0]
    if op not in ("add", "mul", "div", "pow", "factorial", "percent", "binomial", "factorial2"):
        return None
    values = []
    for child in args:
        value = exact(child)
        if value is None:
            return None
        values.append(value)
    return _bounded(_rational(op, values))


def _rational(op: str, values: list[Fraction]) -> Fraction | None:
    first = values[0]
    if op == "add":
        return sum(values, Fraction(0))
    if op == "mul":
        return first * values[1]
    if op == "percent":
        return first / 100
    if op == "div":
        if values[1] == 0:
            raise Undefined("a division by zero")
        return first / values[1]
    if op == "pow":
        return _power_of(first, values[1])
    if any(value.denominator != 1 or value < 0 for value in values):
        return None
    if op == "binomial":
        n, k = int(first), int(values[1])
        if min(k, n - k) * max(n, 1).bit_length() > _MAX_BITS:
            raise TooHard
        return Fraction(math.comb(n, k))
    if first > 5000:
        raise TooHard
    return Fraction(math.factorial(int(first)) if op == "factorial" else math.prod(range(int(first), 0, -2)))


def _power_of(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1:
        return None
    if base == 0 and exponent <= 0:
        raise Undefined("a power of zero")
    bits = max(abs(base.numerator), base.denominator).bit_length() - 1
    if bits * abs(exponent) > _MAX_BITS:
        raise TooHard
    return Fraction(base ** int(exponent)) if abs(base) != 1 else base ** int(exponent % 2)


def _bounded(value: Fraction | None) -> Fraction | None:
    if value is not None and max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise TooHard
    return value


def numeric(node: Node, at: Mapping[str, Any]) -> Any:
    """Return the value to 60 digits, real or complex, with letters as `at` says.

    Raises:
        Undefined: there is none here.
        TooHard: it is too large.
    """
    ctx = context()
    if node.op == "number":
        value: Fraction = node.value[0]
        return ctx.mpf(value.numerator) / value.denominator
    if node.op == "symbol":
        return at[str(node.value)]
    if node.op == "constant":
        return {"pi": ctx.pi, "e": ctx.e, "i": ctx.j, "infinity": ctx.inf}[str(node.value)] * 1
    if node.op == "apply":
        return _opaque(node, at)
    if node.op == "call":
        return _called(ctx, node, at)
    if node.op not in _OPERATIONS:
        raise Undefined(node.op)
    values = [numeric(child, at) for child in node.args]
    try:
        result = _OPERATIONS[node.op](ctx, *values)
    except (ZeroDivisionError, ValueError, OverflowError) as error:
        raise Undefined(str(error)) from error
    return _checked(ctx, result)


def _checked(ctx: Any, value: Any) -> Any:
    """Return a value that the next operation can take; real if its imaginary part is nothing."""
    if ctx.isnan(value):
        raise Undefined("no number")
    if isinstance(value, ctx.mpc):
        if abs(value.imag) <= abs(value.real) * ctx.mpf(10) ** (5 - DIGITS):
            value = value.real
        elif ctx.isinf(value):
            raise Undefined("no number")
    if not ctx.isinf(value) and value != 0 and abs(ctx.mag(value)) > _MAX_MAGNITUDE:
        raise TooHard
    return value


def _power(ctx: Any, base: Any, exponent: Any) -> Any:
    if ctx.isinf(base) or ctx.isinf(exponent):
        if exponent == ctx.inf and isinstance(base, ctx.mpf) and abs(base) != 1:
            return ctx.mpf(0) if abs(base) < 1 else ctx.inf
        if exponent == -ctx.inf and isinstance(base, ctx.mpf) and base > 1:
            return ctx.mpf(0)
        if base == ctx.inf and isinstance(exponent, ctx.mpf) and exponent != 0:
            return ctx.inf if exponent > 0 else ctx.mpf(0)
        raise Undefined("a power of infinity")
    if base == 0:
        if isinstance(exponent, ctx.mpf) and exponent > 0:
            return ctx.mpf(0)
        raise Undefined("a power of zero")
    if abs(exponent) * max(abs(ctx.mag(base)), 1) > _MAX_MAGNITUDE:
        raise TooHard
    if isinstance(base, ctx.mpf) and base < 0 and isinstance(exponent, ctx.mpf) and exponent != ctx.floor(exponent):
        for odd in (3, 5, 7, 9):  # the real root, as in school
            numerator = exponent * odd
            if abs(numerator - ctx.nint(numerator)) < ctx.mpf(10) ** (10 - DIGITS):
                return (-1) ** int(ctx.nint(numerator)) * abs(base) ** exponent
    return base**exponent


def _root(ctx: Any, base: Any, index: Any) -> Any:
    if index == 2:
        return ctx.sqrt(base)
    if index == 0:
        raise Undefined("a root of order zero")
    return _power(ctx, base, 1 / index)


def _small(ctx: Any, *values: Any) -> None:
    for value in values:
        if not ctx.isfinite(value) or abs(value) > _MAX_SPECIAL:
            raise TooHard


def _factorial(ctx: Any, value: Any) -> Any:
    if value == ctx.inf:
        return value
    _small(ctx, value)
    return ctx.gamma(value + 1)


def _double_factorial(ctx: Any, value: Any) -> Any:
    _small(ctx, value)
    return ctx.fac2(value)


def _binomial(ctx: Any, n: Any, k: Any) -> Any:
    _small(ctx, n, k)
    return ctx.binomial(n, k)


def _times(ctx: Any, a: Any, b: Any) -> Any:
    if (ctx.isinf(a) and b == 0) or (ctx.isinf(b) and a == 0):
        raise Undefined("nothing times infinity")
    return a * b


def _quotient(ctx: Any, a: Any, b: Any) -> Any:
    if b == 0 or (ctx.isinf(a) and ctx.isinf(b)):
        raise Undefined("a division by zero")
    return a / b


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": lambda ctx, *values: ctx.fsum(values) if all(map(ctx.isfinite, values)) else sum(values),
    "mul": _times,
    "div": _quotient,
    "pow": _power,
    "root": _root,
    "percent": lambda _, value: value / 100,
    "degrees": lambda ctx, value: value * ctx.pi / 180,
    "factorial": _factorial,
    "factorial2": _double_factorial,
    "binomial": _binomial,
}


def _log10(ctx: Any, value: Any) -> Any:
    return ctx.log(value) / ctx.log(10)


def _gcd(ctx: Any, *values: Any) -> Any:
    return ctx.mpf(math.gcd(*_integers(ctx, values)))


def _lcm(ctx: Any, *values: Any) -> Any:
    return ctx.mpf(math.lcm(*_integers(ctx, values)))


def _integers(ctx: Any, values: tuple[Any, ...]) -> list[int]:
    if any(isinstance(value, ctx.mpc) or not ctx.isint(value) or abs(ctx.mag(value)) > 200 for value in values):
        raise Undefined("no integer")
    return [int(value) for value in values]


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ln": lambda ctx, value: ctx.log(value),
    "lg": _log10,
    "exp": lambda ctx, value: _power(ctx, +ctx.e, value),
    "abs": lambda _, value: abs(value),
    "floor": lambda ctx, value: ctx.floor(value),
    "ceil": lambda ctx, value: ctx.ceil(value),
    "sgn": lambda ctx, value: ctx.sign(value),
    "Re": lambda ctx, value: ctx.re(value),
    "Im": lambda ctx, value: ctx.im(value),
    "arg": lambda ctx, value: ctx.arg(value),
    "max": lambda _, *values: max(values),
    "min": lambda _, *values: min(values),
    "gcd": _gcd,
    "lcm": _lcm,
}
_NAMED = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "arccot": "acot", "arcsec": "asec", "arccsc": "acsc",
          "arcsinh": "asinh", "arccosh": "acosh", "arctanh": "atanh"}  # fmt: skip
_ELEMENTARY = frozenset(["sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth", "sech", "csch"])


def _called(ctx: Any, node: Node, at: Mapping[str, Any]) -> Any:
    name: str = node.value[0]
    if name == "det" and node.args[0].op == "matrix":
        return _checked(ctx, _determinant([[numeric(cell, at) for cell in row.args] for row in node.args[0].args]))
    if name not in _FUNCTIONS and name not in _NAMED and name not in _ELEMENTARY and name not in ("log", "erf"):
        return _opaque(Node("apply", node.args, name), at)
    values = [numeric(child, at) for child in node.args]
    try:
        if name == "log":
            result = ctx.log(values[0]) / (at["log"] if len(values) == 1 else ctx.log(values[1]))
        elif name in _FUNCTIONS:
            result = _FUNCTIONS[name](ctx, *values)
        else:
            (value,) = values
            if name not in ("arctan",) and not ctx.isfinite(value):
                raise Undefined("infinity")
            if name == "erf" or (name in _ELEMENTARY and ctx.isfinite(value) and ctx.mag(value) > 1000):
                _small(ctx, value)
            result = getattr(ctx, _NAMED.get(name, name))(value)
    except (ZeroDivisionError, ValueError, OverflowError, TypeError, IndexError) as error:
        raise Undefined(str(error)) from error
    return _checked(ctx, result)


def _determinant(rows: list[list[Any]]) -> Any:
    if len(rows) != len(rows[0]) or len(rows) > 5:
        raise Undefined("no determinant")
    if len(rows) == 1:
        return rows[0][0]
    minors = ([row[:i] + row[i + 1 :] for row in rows[1:]] for i in range(len(rows)))
    return sum((-1) ** i * rows[0][i] * _determinant(minor) for i, minor in enumerate(minors))


def _opaque(node: Node, at: Mapping[str, Any]) -> Any:
    """Return a value that stands for a function nobody knows: the same for equal arguments, and another for others."""
    parts = [str(node.value)]
    for child in node.args:
        value = numeric(child, at)
        parts.append(context().nstr(value, 25))
    digest = hashlib.sha256("|".join(parts).encode()).digest()
    return context().mpf(int.from_bytes(digest[:8], "big")) / 2**64 + 1
