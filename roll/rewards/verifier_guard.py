"""What an answer may look like before a verifier that executes it sees it, even in the sandbox.

The verifier's process decides about the score, so code that runs in there could write its own. An answer is therefore
plain values, arithmetic, or algebra: no attribute, no call but of known functions, no text but in plain values.
"""

from __future__ import annotations

import ast
import re
from typing import Literal

Grammar = Literal["values", "arithmetic", "algebra"]

GRAMMARS: dict[str, Grammar] = {
    "binary_matrix": "values",
    "n_queens": "values",
    "spiral_matrix": "values",
    "string_insertion": "values",
    "countdown": "arithmetic",
    "puzzle24": "arithmetic",
    "intermediate_integration": "algebra",
    "polynomial_multiplication": "algebra",
    "simple_integration": "algebra",
}
"""How the answers of each verifier that executes them are written."""

_TRIGONOMETRIC = ("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot")
_HYPERBOLIC = ("sinh", "cosh", "tanh", "asinh", "acosh", "atanh")
_FUNCTIONS = frozenset([*_TRIGONOMETRIC, *_HYPERBOLIC, "exp", "log", "ln", "sqrt", "Abs", "Rational"])
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]{0,9}")
_MAX_EXPONENT = 1_000
_HIDDEN_NUMBER = re.compile(r"#|\d_?[A-Za-z_]")
"""Numbers that Python reads and `\\b\\d+\\b` doesn't (`0x18`, `2_4`, `24e0`), and a comment, where it alone reads them:
the verifiers count the numbers of an answer in its text."""
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.UAdd, ast.USub)


def is_plain_answer(answer: str, grammar: Grammar) -> bool:
    """Return whether evaluating this text can do no more than compute a value."""
    if grammar == "arithmetic" and _HIDDEN_NUMBER.search(answer):
        return False
    try:
        tree = ast.parse(answer.strip(), mode="eval").body
        if grammar == "values":
            ast.literal_eval(tree)
            return True
        return _is_algebra(tree, names=grammar == "algebra")
    except SyntaxError:
        # A board or a matrix as text, which the verifier compares as it is: `eval` refuses it too. Sympy's parser
        # doesn't: it rewrites what isn't Python.
        return grammar == "values"
    except (ValueError, TypeError, RecursionError, MemoryError):
        return False


def _is_algebra(node: ast.expr, *, names: bool) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, _OPERATORS) and _is_algebra(node.operand, names=names)
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Pow):
            fits = _is_small(node.right) or any(isinstance(part, ast.Name) for part in ast.walk(node.right))
        else:
            fits = isinstance(node.op, _OPERATORS)
        return fits and _is_algebra(node.left, names=names) and _is_algebra(node.right, names=names)
    if not names:
        return False
    if isinstance(node, ast.Name):
        return _NAME.fullmatch(node.id) is not None
    if isinstance(node, ast.Call):
        known = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
        return known and 0 < len(node.args) <= 2 and all(_is_algebra(part, names=names) for part in node.args)
    return False


def _is_small(node: ast.expr) -> bool:
    """Return whether an exponent without names is a small number, or a quotient of two."""
    if isinstance(node, ast.UnaryOp):
        return _is_small(node.operand)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return _is_small(node.left) and _is_small(node.right)
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _MAX_EXPONENT
