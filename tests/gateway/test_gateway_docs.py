"""The page about the endpoint says what the code does."""

from __future__ import annotations

from pathlib import Path

from built_parts import with_parts

from roll.configs.catalog.harness_table import HARNESSES
from roll.gateway.protocols import wire_formats

PAGE = with_parts((Path(__file__).parents[2] / "docs" / "serve.md").read_text("utf-8"))


def test_the_tables_of_fields_are_those_of_the_code():
    for route in ("chat/completions", "messages", "responses"):
        section = PAGE.split(f"`POST /v1/{route}`\n\n| field | | |\n")[-1].split("\n### ")[0]
        rows = [line for line in section.splitlines() if line.startswith("| `")]
        fields = wire_formats()[route].fields.values()
        assert rows == [f"| `{field.name}` | {field.kind} | {field.says} |" for field in fields]


def test_every_harness_has_a_row_with_the_fields_that_it_stands_for():
    for name, ignored in HARNESSES.items():
        (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` | ")]
        assert all(f"`{field}`" in row for field in ignored)


def test_no_field_is_without_an_explanation():
    assert all(field.says for wire in wire_formats().values() for field in wire.fields.values())
