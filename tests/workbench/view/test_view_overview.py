"""What a whole run comes to: causes of drops, tasks by their change, spans of an episode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from recorded_run import group, row, write_run

from roll.cli.__main__ import main
from roll.workbench.view.api import Api
from roll.workbench.view.export import export_page
from roll.workbench.view.runs import Run
from roll.workbench.view.spans import trace_id

TRACE = "0af7651916cd43dd8448eb211c80319c"


def api_of(folder: Path, **more: Any) -> Api:
    return Api([Run(0, folder, "run")], **more)


def lost(task: str, member: int, words: str, status: str = "env_error", tag: str = "room") -> dict[str, Any]:
    return row(task, member, 0.0, 0.0, status=status, error=words, dropped=words, tag=tag)


TRACEBACK = """room.py:Room (seed {seed}): RuntimeError: the door is locked (room.py:7, in step)
Traceback (most recent call last):
  File "wrappers.py", line 1, in step
    self.step()
  File "room.py", line 7, in step
    raise RuntimeError("the door is locked")
RuntimeError: the door is locked"""


def test_causes_that_differ_in_numbers_alone_are_one_with_its_first_episode(tmp_path):
    others: Any = {
        ("dropped", 2): [lost("r:1", 0, TRACEBACK.format(seed=12)), lost("r:1", 1, "after 30 s", "timeout")],
        ("dropped", 5): [lost("r:9", 0, TRACEBACK.format(seed=7)), lost("r:9", 1, TRACEBACK.format(seed=7), tag="cell"),
                         lost("r:8", 0, TRACEBACK.format(seed=1))],
    }  # fmt: skip
    found = api_of(write_run(tmp_path / "run", {1: group("t", 1.0)}, others=others)).answer("/api/runs/0/causes", {})[
        "causes"
    ]
    shown = [(one["tag"], one["status"], one["episodes"], one["first_step"], one["last_step"]) for one in found]
    assert shown == [
        ("room", "env_error", 3, 2, 5), ("room", "timeout", 1, 2, 2), ("cell", "env_error", 1, 5, 5)
    ]  # fmt: skip
    assert found[0]["dropped"] == "RuntimeError: the door is locked (room.py, line 7)"
    assert (found[0]["step"], found[0]["row"]) == (2, 0)


def test_tasks_that_changed_most_come_first_and_those_met_once_last(tmp_path):
    steps = {1: [*group("a", 0.0, 1.0), *group("b", 0.25, 0.25), *group("once", 1.0)],
             4: [*group("a", 0.5, 1.0), *group("b", 1.0, 1.0)]}  # fmt: skip
    api = api_of(write_run(tmp_path / "run", steps))
    tasks = api.answer("/api/runs/0/tasks", {"kind": ["train"]})["tasks"]
    assert [(one["task_id"], one["change"], one["episodes"]) for one in tasks] == [
        ("b", 0.75, 4), ("a", 0.25, 4), ("once", 0.0, 1)
    ]  # fmt: skip
    assert (tasks[0]["first_step"], tasks[0]["first_reward"]) == (1, 0.25)
    assert (tasks[0]["last_step"], tasks[0]["last_reward"]) == (4, 1.0)
    assert api.answer("/api/runs/0/tasks", {"kind": ["validation"]})["tasks"] == []


def span(name: str, own: str, start: int, end: int, parent: str | None = None, **more: Any) -> dict[str, Any]:
    found = {
        "traceId": TRACE,
        "spanId": own,
        "name": name,
        "startTimeUnixNano": str(start * 10**9),
        "endTimeUnixNano": str(end * 10**9),
        "attributes": [{"key": "turn", "value": {"intValue": "3"}}],
    }
    return found | ({"parentSpanId": parent} if parent else {}) | more


def line(*spans: dict[str, Any]) -> str:
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"scope": {"name": "episodes"}, "spans": list(spans)}]}]})


def test_the_spans_of_an_episode_are_found_in_a_file_that_grows(tmp_path):
    folder = write_run(tmp_path / "run", {1: group("t", 1.0)})
    file, api = folder / "logs" / "spans.jsonl", api_of(folder)
    assert api.answer("/api/runs/0/spans", {"trace": [TRACE]}) == {"spans": []}
    other = {**span("other", "c" * 16, 0, 1), "traceId": "1" * 32}
    first = span("episode", "a" * 16, 100, 108)
    file.write_text(line(other) + "\n" + line(other, first) + "\nnot JSON " + TRACE + "\n" + line(first)[:40])
    assert [one["name"] for one in api.answer("/api/runs/0/spans", {"trace": [TRACE]})["spans"]] == ["episode"]
    failed = span("generate", "b" * 16, 102, 105, "a" * 16, status={"code": 2})
    file.write_text(line(first) + "\n" + line(failed) + "\n")
    assert api.answer("/api/runs/0/spans", {"trace": [TRACE]})["spans"] == [
        {"id": "a" * 16, "parent": None, "name": "episode", "scope": "episodes", "start": 0.0, "seconds": 8.0,
         "failed": False, "attributes": {"turn": "3"}},
        {"id": "b" * 16, "parent": "a" * 16, "name": "generate", "scope": "episodes", "start": 2.0, "seconds": 3.0,
         "failed": True, "attributes": {"turn": "3"}},
    ]  # fmt: skip


def test_an_exported_page_takes_causes_tasks_and_spans_along(tmp_path):
    traced = row("t", 0, 1.0, 0.0, trace=f"00-{TRACE}-{'a' * 16}-01")
    folder = write_run(
        tmp_path / "run", {1: [traced], 2: group("u", 1.0)}, others={("dropped", 2): [lost("r", 0, "locked")]}
    )
    (folder / "logs" / "spans.jsonl").write_text(line(span("episode", "a" * 16, 0, 1)) + "\n")
    out = tmp_path / "out.html"
    export_page(api_of(folder), out, episodes=50, steps=[1])
    data = out.read_text().partition('id="recorded">')[2].partition("</script>")[0]
    answers = json.loads(data)["answers"]
    assert answers[f"/api/runs/0/spans?trace={TRACE}"]["spans"][0]["name"] == "episode"
    assert answers["/api/runs/0/causes"]["causes"][0]["dropped"] == "locked"
    tasks = answers["/api/runs/0/tasks?kind=train"]["tasks"]
    assert [one["task_id"] for one in tasks] == ["t"], "only those whose episodes the file has"


def test_where_a_trace_is_shown_elsewhere_is_an_address_with_its_id(tmp_path, capsys):
    folder = write_run(tmp_path / "run", {1: group("t", 1.0)})
    url = "http://localhost:16686/trace/{trace}"
    assert api_of(folder, trace_url=url).answer("/api/runs", {})["trace_url"] == url
    for wrong in ("javascript:alert({trace})", "http://localhost/"):
        assert main(["view", str(folder), "--trace_url", wrong]) == 2
        assert "is no address with {trace} in it" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "nonsense", f"00-{TRACE}", f"00-{TRACE[:-1]}-{'a' * 16}-01"])
def test_what_is_no_traceparent_has_no_trace(text):
    assert trace_id(text) == ""
    assert trace_id(f"00-{TRACE}-{'a' * 16}-01") == TRACE
