"""Fine-tuning under thirteen chat templates, those of others read from the pinned wheel of TRL: some minutes each run.

docs/benchmarks.md has the table.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from chat_templates import KINDS, measure, templates


@pytest.fixture(scope="session")
def texts() -> dict[str, str]:
    return templates(None)


@pytest.mark.parametrize("name", KINDS)
def test_what_was_taught_ends_a_response_and_thoughts_are_where_the_template_puts_them(
    name: str, texts: dict[str, str], tmp_path: Path
) -> None:
    found = measure(name, texts[KINDS[name].template], tmp_path, steps=300)
    assert found.ended >= 0.95
    assert found.ended_alone >= 0.95
    assert found.right >= 0.9
    assert found.accuracy >= 0.99
