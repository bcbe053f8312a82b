"""The tool `calculator`: arithmetic, read by Python's parser and worked out here; nothing is evaluated as code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from roll.envs.tools.base import Tool, ToolError

Number = int | float

_MAX_CHARACTERS = 1000
_MAX_BITS = 10_000
"""Of a whole number: beyond it arithmetic takes time, and nobody reads it."""

_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: a // b if isinstance(a, int) and isinstance(b, int) and b and a % b == 0 else a / b,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda a, b: _power(a, b),
    ast.BitXor: lambda a, b: _power(a, b),  # as people write powers
}
_CONSTANTS: dict[str, Number] = {"pi": math.pi, "e": math.e, "tau": math.tau}
_FUNCTIONS: dict[str, Callable[..., Number]] = {
    "abs": abs,
    "min": min,
    "max": max,
    "round": lambda x, digits=None: _rounded(x, digits),
    "floor": math.floor,
    "ceil": math.ceil,
    "sqrt": lambda x: math.isqrt(x) if isinstance(x, int) and x >= 0 and math.isqrt(x) ** 2 == x else math.sqrt(x),
    "gcd": math.gcd,
    "lcm": lambda a, b: math.lcm(a, b),
    "factorial": lambda n: math.factorial(_small(n, 1000)),
    "comb": lambda n, k: math.comb(_small(n, 5000), k),
    "perm": lambda n, k: math.perm(_small(n, 1000), k),
    **{name: getattr(math, name) for name in ("exp", "log", "log2", "log10", "sin", "cos", "tan", "asin", "acos")},
    **{name: getattr(math, name) for name in ("atan", "atan2", "sinh", "cosh", "tanh", "hypot", "degrees", "radians")},
    "ln": math.log,
}


class Calculator(Tool):
    """Works out expressions: + - * / // % ^ (or **), brackets, the usual functions, pi, e. Whole numbers are exact."""

    description = "Work out an arithmetic expression, e.g. (3 + 4) * 12 / 7, sqrt(2) or 2^10."
    parameters = {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "The expression."}},
        "required": ["expression"],
        "additionalProperties": False,
    }

    def call(self, arguments: Mapping[str, Any], state: Any) -> str:  # noqa: ARG002
        return shown(worked_out(arguments["expression"]))


def worked_out(expression: str) -> Number:
    """Return the value of an expression. Raises `ToolError`."""
    text = expression.strip().rstrip("=").replace("×", "*").replace("÷", "/").replace("−", "-")
    if len(text) > _MAX_CHARACTERS:
        raise ToolError(f"the expression is longer than {_MAX_CHARACTERS} characters")
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except ToolError:
        raise
    except (SyntaxError, MemoryError) as error:
        raise ToolError(f"this isn't an arithmetic expression: {text[:100]}") from error
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except (ArithmeticError, ValueError, TypeError, RecursionError) as error:
        raise ToolError(f"this can't be worked out: {error}") from error
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolError("the result is too large")
    return value


def shown(value: Number) -> str:
    """Return a number as people write it: a whole one without a point, others with up to 12 digits."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _value(node: ast.AST) -> Number:
    value: Number
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        value = node.value
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        value = _UNARY[type(node.op)](_value(node.operand))
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        value = _BINARY[type(node.op)](_value(node.left), _value(node.right))
    elif isinstance(node, ast.Name) and node.id in _CONSTANTS:
        value = _CONSTANTS[node.id]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function = _FUNCTIONS.get(node.func.id)
        if function is None:
            raise ToolError(f"there is no function {node.func.id[:40]}; there are {', '.join(_FUNCTIONS)}")
        value = function(*[_value(argument) for argument in node.args])
    else:
        raise ToolError(f"only numbers, + - * / // % ^ and functions can be worked out, not {type(node).__name__}")
    if not isinstance(value, (int, float)):
        raise ToolError("the result isn't a real number")
    return _bounded(value)


def _bounded(value: Number) -> Number:
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise ToolError("a number is too large")
    return value


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > _MAX_BITS:
        if abs(base) > 1:
            raise ToolError("a power is too large")
        exponent = exponent % 2 or 2 if base else exponent  # of -1 and 1
    result: Number = base**exponent
    return result


def _rounded(x: Number, digits: Number | None) -> Number:
    if digits is None:
        return round(x)
    # Python works out ten to the power of the places; beyond these no number has any.
    return round(x, max(-_MAX_BITS, min(int(digits), _MAX_BITS)))


def _small(n: Number, limit: int) -> int:
    if not isinstance(n, int) or n > limit:
        raise ToolError(f"expected a whole number up to {limit}")
    return n
