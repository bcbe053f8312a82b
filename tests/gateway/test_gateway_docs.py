"""The page about the endpoint says what the code does."""

from __future__ import annotations

from pathlib import Path

from built_parts import with_parts

from roll.configs.catalog.harness_table import HARNESSES
from roll.configs.schema.agents_config import GatewayConfig
from roll.gateway.agents.agent_endpoint import RunEndpoint
from roll.gateway.protocols import wire_formats
from roll.gateway.server import Gateway

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


def test_the_limits_of_bodies_and_responses_are_those_of_roll_serve_and_of_training(tmp_path):
    serve = Gateway().sessions.limits
    train = RunEndpoint(GatewayConfig(), {}, tmp_path, engines=None)._gateway.sessions.limits
    assert (serve.body_bytes, serve.body_seconds, serve.call_seconds) == (8 << 20, 60, 3600)
    assert (train.body_bytes, train.body_seconds, train.call_seconds) == (16 << 20, 60, 600)
    (size,) = [line for line in PAGE.splitlines() if line.startswith("| 405, 413 | ")]
    assert "larger than 8 MiB (`roll serve`) or `gateway.max_body_mb` (training; 16 MiB by default)" in size
    (late,) = [line for line in PAGE.splitlines() if line.startswith("| 408 | ")]
    assert "within a minute" in late
    assert "longer than an hour (`roll serve`) or `gateway.call_timeout_s` (training; 600 s by default)" in late
