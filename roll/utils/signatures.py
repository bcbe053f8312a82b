"""Keyword arguments from YAML, compared with what a function or class of the user's own takes."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_TYPES = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}
"""Annotations that a value is compared with; others may be anything."""


@dataclass(frozen=True)
class Signature:
    """What may be given by name."""

    required: frozenset[str]
    annotations: Mapping[str, str]
    """Every name, with its annotation as text; empty where it has none."""
    takes_any: bool
    """It has `**kwargs`, or nothing is known of it."""

    def problems(self, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield (name, what is wrong with it) of arguments that are unknown, missing, or of another type."""
        for name, value in given.items():
            if name not in self.annotations:
                if not self.takes_any:
                    near = difflib.get_close_matches(name, self.annotations, n=1)
                    known = f"it has {', '.join(self.annotations)}" if self.annotations else "it has none"
                    yield name, f"there is no such option; {f'did you mean {near[0]!r}? ' if near else ''}{known}"
                continue
            annotation = self.annotations[name]
            if annotation in _TYPES and type(value) not in _TYPES[annotation]:
                yield name, f"it is annotated as {annotation}, which {value!r} isn't"
        for name in sorted(self.required - set(given)):
            yield name, "it has no default and must be given"


def signature_of(function: Callable[..., Any], *, skip: int) -> Signature:
    """Return what a function or class takes by name, without its first `skip` parameters."""
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return Signature(
        required=frozenset(p.name for p in plain if p.default is p.empty),
        annotations={p.name: _text(p.annotation) for p in plain},
        takes_any=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def signature_in_source(node: ast.AST, *, skip: int) -> Signature:
    """Return the same of a definition that is only read; of a class that inherits its `__init__` nothing is known."""
    if isinstance(node, ast.ClassDef):
        made = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
        node, skip = (made[0] if made else node), skip + 1
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return Signature(frozenset(), {}, takes_any=True)
    spec = node.args
    positional = [*spec.posonlyargs, *spec.args]
    without = len(positional) - len(spec.defaults)
    required = {argument.arg for argument in positional[skip:without]}
    required |= {one.arg for one, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if default is None}
    named = [*positional[skip:], *spec.kwonlyargs]
    annotations = {one.arg: ast.unparse(one.annotation) if one.annotation else "" for one in named}
    return Signature(frozenset(required), annotations, takes_any=spec.kwarg is not None)


def _text(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
