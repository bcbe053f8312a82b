"""docs/coming_from.md names keys that exist."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from roll.configs.parsing.key_hints import FOREIGN_KEYS

ROOT = Path(__file__).parents[1]


def script(name: str) -> ModuleType:
    path = ROOT / "docs" / "generate" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def keys() -> dict[str, set[str]]:
    """Sections by key: where it may stand, "" for the top level."""
    reference = script("config_reference")
    places: dict[type, list[str]] = {}
    for cls in reference.PIPELINES.values():
        reference._collect(cls, "", places)
        places.setdefault(cls, []).append("")
    found: dict[str, set[str]] = {}
    for cls, where in places.items():
        for spec in fields(cls):
            found.setdefault(spec.name, set()).update(place.strip("`") for place in where)
    return found


PAGE = script("coming_from")
NAMED = [
    (library, theirs, key)
    for library, words in PAGE.hand_list().items()
    for theirs, ours in words.items()
    for key in re.findall("`([^`]+)`", ours)
]


def test_the_page_is_what_is_generated():
    assert (ROOT / "docs" / "coming_from.md").read_text("utf-8") == PAGE.page(), "run: make docs"


@pytest.mark.parametrize(("library", "theirs", "key"), NAMED, ids=[f"{row[0]}-{row[2]}" for row in NAMED])
def test_every_key_of_the_hand_list_exists_in_its_section(library: str, theirs: str, key: str):
    *section, name = key.split(":")[0].split(".")
    assert name in keys(), f"{library}: {theirs} -> {key}"
    if section:
        place = ".".join(section).replace("<domain>", "<name>")
        assert any(f".{where}".endswith(f".{place}") for where in keys()[name]), (
            f"{key} stands in {sorted(keys()[name])}"
        )


@pytest.mark.parametrize("theirs", FOREIGN_KEYS)
def test_a_hint_to_write_a_key_names_one_that_exists(theirs: str):
    hint = FOREIGN_KEYS[theirs]
    for written in re.findall(r"\bwrite ([\w.]+)", hint):
        assert written.rstrip(".").split(".")[-1] in {*keys(), "it"}, f"{theirs}: {hint}"
