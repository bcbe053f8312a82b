"""Whole-number arithmetic of shell scripts, `$((1024 * 20))`: sums, products, quotients and powers of numbers."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

_MOST = 2**63
_LONGEST = 200
_SIGNS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),  # towards 0, as shells divide
    ast.Mod: lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
    ast.Pow: lambda a, b: a**b if 0 <= b < 64 else _MOST,
}


def whole_number(text: str) -> int | None:
    """Return the value of an expression of whole numbers; None where it is something else, or too large."""
    try:
        return _value(ast.parse(text.strip(), mode="eval").body) if len(text) <= _LONGEST else None
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        found = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        found = _value(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    elif isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        found = _SIGNS[type(node.op)](_value(node.left), _value(node.right))
    else:
        raise ValueError("no whole number")
    if abs(found) >= _MOST:
        raise ValueError("too large")
    return found
