"""The sweep over collections of environments: one id of each kind, and the tables in a page."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import env_hubs


@pytest.fixture
def one_id(monkeypatch):
    monkeypatch.setattr(env_hubs, "GYMNASIUM", ("CliffWalking-v1", "Nothing-v0"))


def test_ids_are_played_and_written_once(one_id, tmp_path, capsys):
    env_hubs.sweep("gymnasium", sys.executable, tmp_path, "")
    env_hubs.sweep("gymnasium", sys.executable, tmp_path, "")
    assert capsys.readouterr().out.count("\n") == 2
    rows = {row["id"]: row for row in map(json.loads, (tmp_path / "gymnasium.jsonl").read_text().splitlines())}
    assert rows["gymnasium:CliffWalking-v1"]["result"] == "passed", rows
    assert rows["gymnasium:Nothing-v0"]["result"] == "no start"
    page = tmp_path / "page.md"
    page.write_text(f"before\n{env_hubs.MARKS[0]}\nold\n{env_hubs.MARKS[1]}\nafter\n")
    env_hubs.write_tables(page, tmp_path)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| gymnasium | 2 | 2 | 1 | 1 | 0 | 100.0% |" in text
    assert "| gymnasium | no start | 1 | `Nothing-v0` | gymnasium can't make" in text


def test_ids_that_fail_for_the_same_reason_share_a_line():
    rows = [
        {"id": f"h:{n}", "result": "failed", "why": f"is played: ValueError: seed {n}00000 in /some/where/{n}/game.py"}
        for n in range(1, 7)
    ]
    text = env_hubs.tables({"h": rows})
    assert "| h | failed | 1 | `1` | is played: ValueError: seed in game.py |" not in text
    assert "| h | failed | 6 | `1`, `2`, `3`, `4` and 2 more | is played: ValueError: seed in game.py |" in text
    assert "| h | 6 | 6 | 6 | 0 | 0 | 0.0% |" in text


def test_a_page_without_marks_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(SystemExit, match="lacks the lines"):
        env_hubs.write_tables(page, tmp_path)
