"""docs/coming_from.md has what the tables say."""

from __future__ import annotations

import re
from pathlib import Path

from built_parts import with_parts

from roll.configs.parsing.key_hints import OTHER_PIPELINE_KEYS
from roll.workbench.migrate.table import systems

ROOT = Path(__file__).parents[3]
PAGE = with_parts((ROOT / "docs" / "coming_from.md").read_text("utf-8"))
FATES = {"translated": "=", "decided": "choice", "dead": "not needed", "quiet": "not here", "absent": "**asks**"}


def test_every_key_of_every_system_is_below_the_heading_of_its_system():
    for name, system in systems().items():
        (section,) = re.findall(rf"^## {re.escape(system.name)}(?: [^ \n]+)?\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
        missing = [row.key for row in system.rows if row.key != "**" and f"`{row.key}`" not in section]
        assert not missing, (name, missing)


def test_every_row_has_the_fate_of_its_key_and_what_it_is_here():
    lines = [line for line in PAGE.splitlines() if line.startswith("| `")]
    rows = [row for system in systems().values() for row in system.rows if row.key != "**"]
    wrong = []
    for row in rows:
        cells = [line.split(" | ") for line in lines if f"`{row.key}`" in line.split(" | ")[0]]
        right = [cell for cell in cells if cell[1] == FATES[row.fate] and names_all(row.to, " | ".join(cell[2:]))]
        same = row.fate == "translated" and row.to == (row.key,) and not row.note  # listed above the table
        wrong += [] if right or same else [row.key]
    assert not wrong


def names_all(keys, text):
    return all(f"`{key}`" in text for key in keys)


def test_the_page_explains_every_fate_and_every_key_of_another_pipeline():
    for fate in FATES.values():
        assert f"\n| {fate} | " in PAGE
    for pipeline, hints in OTHER_PIPELINE_KEYS.items():
        assert [key for key in hints if f"\n| `{pipeline}` | `{key}` | " not in PAGE] == []
