"""Where a function of the user's own is defined, and what it takes: sources are read, nothing is imported."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from roll.configs.catalog.signatures import CallStyle, Signature, call_style, parameter_names, signature_in_source

_MADE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_MAX_HOPS = 8
"""Imports and aliases that are followed from a name to its definition."""


@dataclass(frozen=True)
class Definition:
    """A function, class, or method `__call__`, and what is already bound of it."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    bound: frozenset[str] = frozenset()
    """Parameters that a `functools.partial` gives by name."""
    skip: int = 0
    """First parameters that are given: `self`, and what a partial gives by position."""

    @property
    def is_class(self) -> bool:
        """Return whether the name means a class itself, and not an object that can be called."""
        return isinstance(self.node, ast.ClassDef)

    @property
    def style(self) -> CallStyle:
        """Return how it is called as a reward function."""
        return call_style(parameter_names(self.node)[self.skip :])

    def signature(self, *, skip: int) -> Signature:
        """Return what it takes besides its first `skip` parameters that are open."""
        signature = signature_in_source(self.node, skip=skip + self.skip)
        return replace(signature, required=signature.required - self.bound)


def definition_in(file: Path, name: str, hops: int = _MAX_HOPS) -> Definition | None:
    """Return what a name at the top level of a file means; None where that shows only when it runs."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None  # another check says so
    for node in reversed(list(_statements(tree.body))):
        if isinstance(node, _MADE) and node.name == name:
            return Definition(node)
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return _assigned(node.value, file, hops - 1) if hops else None
        if isinstance(node, ast.ImportFrom):
            alias = next((one for one in node.names if (one.asname or one.name) == name), None)
            if alias is not None:
                source = module_file(node.module or "", file if node.level else None, node.level)
                return definition_in(source, alias.name, hops - 1) if source is not None and hops else None
    return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Give the statements of a module, those under `if` and `try` included."""
    for node in body:
        if isinstance(node, ast.If):
            yield from _statements([*node.orelse, *node.body])  # what type checkers read comes last, and wins
        elif isinstance(node, ast.Try):
            yield from _statements([*node.body, *node.orelse])
        else:
            yield node


def _assigned(value: ast.expr, file: Path, hops: int) -> Definition | None:
    """Return what stands on the right side: another name, a partial of one, or an object of a class."""
    if isinstance(value, ast.Name):
        return definition_in(file, value.id, hops)
    if not isinstance(value, ast.Call):
        return None
    if ast.unparse(value.func) in ("partial", "functools.partial") and value.args:
        inner = definition_in(file, value.args[0].id, hops) if isinstance(value.args[0], ast.Name) else None
        if inner is None or any(isinstance(one, ast.Starred) for one in value.args):
            return None
        if any(keyword.arg is None for keyword in value.keywords):
            return None
        bound = {keyword.arg for keyword in value.keywords if keyword.arg is not None}
        return replace(inner, bound=inner.bound | bound, skip=inner.skip + len(value.args) - 1)
    made = definition_in(file, value.func.id, hops) if isinstance(value.func, ast.Name) else None
    if made is None or not isinstance(made.node, ast.ClassDef):
        return None
    calls = [part for part in made.node.body if isinstance(part, _MADE[:2]) and part.name == "__call__"]
    return Definition(calls[-1], skip=1) if calls else None


def module_file(module: str, beside: Path | None = None, level: int = 0) -> Path | None:
    """Return the source of `package.module`, relative to a file's package where `level` dots say so; None: nobody
    knows without importing it."""
    names = [name for name in module.split(".") if name]
    if beside is not None:
        folders = [beside.parents[level - 1]] if level <= len(beside.parents) else []
    elif not names:
        return None
    else:
        try:
            spec = importlib.util.find_spec(names[0])
        except (ValueError, ImportError):
            return None
        if spec is None:
            return None
        if len(names) == 1 and spec.origin is not None and spec.origin.endswith(".py"):
            return Path(spec.origin)
        folders, names = [Path(folder) for folder in spec.submodule_search_locations or ()], names[1:]
    for folder in folders:
        at = folder.joinpath(*names)
        for file in (at / "__init__.py", at.with_name(f"{at.name}.py")):
            if file.is_file():
                return file
    return None
