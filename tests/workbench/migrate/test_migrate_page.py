"""docs/coming_from.md is what the tables say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from roll.workbench.migrate.table import systems

ROOT = Path(__file__).parents[3]


def script(name: str) -> ModuleType:
    path = ROOT / "docs" / "generate" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGE = script("coming_from").page()


def test_the_page_is_what_is_generated():
    assert (ROOT / "docs" / "coming_from.md").read_text("utf-8") == PAGE, "run: make docs"


def test_every_key_of_every_system_is_on_the_page():
    assert not [row.key for system in systems().values() for row in system.rows if f"`{row.key}`" not in PAGE and
                row.key != "**"]  # fmt: skip
