"""Keys of other projects in a configuration: explained by the tables of `roll migrate`, where those are installed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Protocol, cast

EXPLAINER = "roll.workbench.migrate.hints"
"""Module that knows them. The loader does without: then such a key is refused like any other unknown one."""


class Explainer(Protocol):
    """What the loader asks of it; paths are dotted, `offline` is a pipeline that learns from finished rows."""

    def exact_hint(self, path: str, *, offline: bool = False) -> str:
        """Return what to write in place of a key that another project has at this very place, or nothing."""

    def foreign_hint(self, path: str, role: str = "", *, offline: bool = False) -> str:
        """Return what to write in place of a key that isn't one here, if another project has it, or nothing."""

    def section_hint(self, words: Sequence[str]) -> str:
        """Return where the keys below a section of another project are here, or nothing."""

    def is_foreign_section(self, words: Sequence[str]) -> bool:
        """Return whether keys of another project stand below this path."""

    def also(self, words: Sequence[str], elsewhere: Sequence[str]) -> str:
        """Return what a word at the top level may mean besides, by other projects."""

    def unneeded(self, path: Sequence[str]) -> str:
        """Return why nothing here needs a key of ROLL, or nothing."""


class _Nobody:
    """Knows no other project."""

    def exact_hint(self, path: str, *, offline: bool = False) -> str:  # noqa: ARG002
        return ""

    def foreign_hint(self, path: str, role: str = "", *, offline: bool = False) -> str:  # noqa: ARG002
        return ""

    def section_hint(self, words: Sequence[str]) -> str:  # noqa: ARG002
        return ""

    def is_foreign_section(self, words: Sequence[str]) -> bool:  # noqa: ARG002
        return False

    def also(self, words: Sequence[str], elsewhere: Sequence[str]) -> str:  # noqa: ARG002
        return ""

    def unneeded(self, path: Sequence[str]) -> str:  # noqa: ARG002
        return ""


@cache
def explainer() -> Explainer:
    """Return who explains unknown keys; imported when there is one to explain."""
    try:
        return cast(Explainer, importlib.import_module(EXPLAINER))
    except ModuleNotFoundError:
        return _Nobody()
