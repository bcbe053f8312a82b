"""Small faults that are put into programs, the same ones each time."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

_SWAPS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
}  # fmt: skip


def mutants(program: str) -> Iterator[tuple[str, str]]:
    """Give up to three mutants: the last operator swapped, the last `return` dropped, the last constant off by one."""
    tree = ast.parse(program)
    for kind, change in (("operator", _swap), ("return", _drop), ("constant", _off_by_one)):
        nodes = [i for i, node in enumerate(ast.walk(tree)) if change(copy.deepcopy(node))]
        if not nodes:
            continue
        mutant = copy.deepcopy(tree)
        change(list(ast.walk(mutant))[nodes[-1]])
        yield kind, ast.unparse(ast.fix_missing_locations(mutant))


def _swap(node: ast.AST) -> bool:
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in _SWAPS:
        node.op = _SWAPS[type(node.op)]()
        return True
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
        node.ops[0] = _SWAPS[type(node.ops[0])]()
        return True
    return False


def _drop(node: ast.AST) -> bool:
    if isinstance(node, ast.Return) and node.value is not None:
        node.value = None
        return True
    return False


def _off_by_one(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        node.value += 1
        return True
    return False
