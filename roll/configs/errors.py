"""One error for everything that is wrong with a configuration."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any


class _NoValue:
    def __repr__(self) -> str:
        return "nothing"


_SHOWN = 100
"""Violations in one message; a file of another kind has thousands."""
_LONGEST_WORD = 100
"""Characters of a word that is compared with others: it takes time with the square of the length."""
NO_VALUE: Any = _NoValue()
"""For violations about something that isn't there."""


@dataclass(frozen=True)
class Violation:
    """One thing that is wrong."""

    path: str
    """Dotted path of the key."""
    expected: str
    """What should be there; or, with `problem`, nothing."""
    fix: str = ""
    value: Any = NO_VALUE
    problem: str = ""
    """What is wrong as a sentence of its own, where "expected ..." would be none."""
    where: str = ""
    """`file:line` of the key, or of the section that lacks it; empty where that isn't known."""

    def __str__(self) -> str:
        fix = f"\n      at: {self.where}" if self.where else ""
        fix += f"\n      fix: {self.fix}" if self.fix else ""
        got = "" if self.value is NO_VALUE else f"got {_short(self.value)}"
        if self.problem:
            return f"{self.path}: {self.problem}{f' ({got})' if got else ''}{fix}"
        return f"{self.path}: {f'{got}, ' if got else ''}expected {self.expected}{fix}"


def problem(path: str, sentence: str, fix: str = "", value: Any = NO_VALUE) -> Violation:
    """Return a violation that says in a sentence what is wrong."""
    return Violation(path, "", fix, value, sentence)


def no_effect(path: str, why: str, fix: str = "remove it", value: Any = NO_VALUE) -> Violation:
    """Return the violation of a key that would do nothing; `why` goes on after "this key has no effect"."""
    return problem(path, f"this key has no effect{why}", fix, value)


class ConfigError(ValueError):
    """A configuration that can't run; `violations` lists every reason."""

    def __init__(self, violations: Sequence[Violation], source: str = "") -> None:
        self.violations = tuple({str(violation): violation for violation in violations}.values())
        self.source = source
        count = "1 problem" if len(self.violations) == 1 else f"{len(self.violations)} problems"
        where = f" in {source}" if source else " in the configuration"
        lines = [f"{count}{where}", *(f"  * {violation}" for violation in self.violations[:_SHOWN])]
        if len(self.violations) > _SHOWN:
            lines.append(f"  and {len(self.violations) - _SHOWN} more")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.violations, self.source)


def of_no_file(error: ConfigError, file: str, source: str) -> ConfigError:
    """Return the error without the name of a file that users haven't written and that is gone when they read of it."""
    violations = [
        replace(violation, where="") if violation.where.startswith(file) else violation
        for violation in error.violations
    ]
    return ConfigError(violations, source if file in str(error.source) else error.source)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `did you mean 'x'?` with the nearest known words, or the whole list when it is short, or nothing."""
    names = sorted(known)
    if near := nearest(word, names):
        return near
    return f"known: {', '.join(names)}" if 0 < len(names) <= 14 else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `did you mean 'x'?` with the nearest known words, or nothing."""
    if len(word) > _LONGEST_WORD:
        return ""
    near = difflib.get_close_matches(word, sorted(known), n=2, cutoff=0.6)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""


def _short(value: Any) -> str:
    yaml_words = {None: "null", True: "true", False: "false"}
    try:
        text = yaml_words[value] if value is None or isinstance(value, bool) else repr(value)
    except (ValueError, RecursionError) as error:  # a number of more digits than Python writes, or a deep tree
        text = f"{type(value).__name__} ({error})"
    return text if len(text) <= 120 else f"{text[:117]}..."
