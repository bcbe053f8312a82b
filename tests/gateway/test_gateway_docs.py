"""The page about the endpoint says what the code does."""

from __future__ import annotations

from pathlib import Path

from endpoint_fields import with_tables

from roll.gateway.protocols import wire_formats

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"


def test_the_tables_of_fields_are_those_of_the_code():
    page = PAGE.read_text("utf-8")
    assert page == with_tables(page), "run `make docs`"


def test_no_field_is_without_an_explanation():
    assert all(field.says for wire in wire_formats().values() for field in wire.fields.values())
