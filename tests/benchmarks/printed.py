"""What benchmarks print."""

from __future__ import annotations


def rows(printed: str) -> list[str]:
    """The first cells of the tables' rows."""
    lines = [line for line in printed.splitlines() if line.startswith("| ")]
    return [line.split("|")[1].strip() for line in lines]
