"""Which tier a test belongs to: the one place that says so. docs/testing.md says what the tiers are for.

`fast` (`make test`) is what no other line claims. `full` (`make test-full`) needs a second process group, a foreign
engine, or more than some seconds. `evidence` (`make evidence`) are campaigns that no continuous integration runs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

TIERS = ("fast", "full", "evidence")

RANKS = "ranks"
"""Fixture of a process per rank: what asks for it is full unless `SMALL_REAL_RUNS` names it."""

EVIDENCE = ("evidence/*",)

FULL: tuple[str, ...] = ()
"""Patterns of test ids below tests/."""

SMALL_REAL_RUNS: tuple[str, ...] = ()
"""One small run each of hf_infer, FSDP2 on one and on two ranks, DeepSpeed, Megatron, `inline` and `ray`."""


def tier_of(test_id: str, fixtures: Collection[str] = ()) -> str:
    """Return the tier of a test such as `strategies/test_x.py::test_y[z]`, which uses `fixtures`."""
    if _matches(test_id, EVIDENCE):
        return "evidence"
    if _matches(test_id, SMALL_REAL_RUNS):
        return "fast"
    return "full" if RANKS in fixtures or _matches(test_id, FULL) else "fast"


def _matches(test_id: str, patterns: Sequence[str]) -> bool:
    # Brackets are parameters here, not character classes.
    return any(fnmatchcase(test_id, pattern.replace("[", "[[]")) for pattern in patterns)


def is_named(test_id: str, arguments: Sequence[str]) -> bool:
    """Return whether the command line names this test or its file, which then runs whatever its tier."""
    for argument in arguments:
        path, _, name = argument.partition("::")
        if not path.endswith(".py"):
            continue
        file, _, own = test_id.partition("::")
        if Path(path).as_posix().endswith(f"tests/{file}") and (not name or own == name or own.startswith(f"{name}[")):
            return True
    return False
