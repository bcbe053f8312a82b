"""Regular expressions of users that meet text of a model: checked before the run, and bounded in time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

SECONDS = 1.0
"""What one search may take: patterns of an ordinary kind take microseconds."""


def compile_pattern(pattern: str, *, ignore_case: bool = False) -> Any:
    """Compile a pattern (the syntax of Python's `re`; `.` matches line breaks too); `ValueError` if it is none."""
    import regex

    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"a pattern is a text that isn't empty, got {pattern!r}")
    try:
        return regex.compile(pattern, regex.DOTALL | regex.MULTILINE | (regex.IGNORECASE if ignore_case else 0))
    except regex.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None


def matches(compiled: Any, text: str, *, full_match: bool = False, seconds: float = SECONDS) -> Iterator[Any]:
    """Yield the matches; with `whole` at most one, of the whole text. `TimeoutError` after `seconds` for all."""
    try:
        if full_match:
            match = compiled.fullmatch(text, timeout=seconds)
            if match is not None:
                yield match
            return
        yield from compiled.finditer(text, timeout=seconds)
    except TimeoutError:
        raise TimeoutError(
            f"the pattern {compiled.pattern!r} took longer than {seconds:g} s on a response of {len(text)} "
            "characters; write it without nested repetitions"
        ) from None
