"""The sweep over collections of environments: an id that starts and one that doesn't, and the tables in a page."""

from __future__ import annotations

import importlib
import json

import pytest


def test_ids_are_played_once_and_told_in_a_page(bench, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- tables of benchmarks/env_hubs.py -->\nold\n<!-- end of the tables -->\nafter\n", encoding="utf-8"
    )
    arguments = ("--hub", "gymnasium", "--ids", "CliffWalking-v1", "Nothing-v0", "--output", tmp_path, "--table", page)
    assert bench("env_hubs", *arguments).count("\n") == 2
    assert bench("env_hubs", *arguments) == ""
    found = [json.loads(line) for line in (tmp_path / "gymnasium.jsonl").read_text().splitlines()]
    assert [row["result"] for row in found] == ["passed", "no start"], found
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| gymnasium | 2 | 2 | 1 | 1 | 0 | 100.0% |" in text
    assert "| gymnasium | no start | 1 | `Nothing-v0` | NameNotFound" in text
    page.write_text("nothing")
    with pytest.raises(SystemExit, match="lacks the lines"):
        bench("env_hubs", *arguments)


def test_ids_that_fail_for_the_same_reason_share_a_line(bench):
    rows = [
        {"id": f"h:{n}", "result": "failed", "why": f"is played: ValueError: seed {n}00000 in /some/where/{n}/game.py"}
        for n in range(1, 7)
    ]
    text = importlib.import_module("env_hubs").tables({"h": rows})
    assert "| h | failed | 6 | `1`, `2`, `3`, `4` and 2 more | is played: ValueError: seed in game.py |" in text
    assert "| h | 6 | 6 | 6 | 0 | 0 | 0.0% |" in text
