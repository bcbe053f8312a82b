"""Step lines, the jsonl tracker, and the drop log: each step exactly once, whatever happened in between."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.tracking.base import Destination, Sample
from roll.tracking.drops import DropLog
from roll.tracking.jsonl import JsonlTracker, comparable_metrics
from roll.tracking.steplines import StepLines, read_steps


def write(path: Path, steps: range, resume_step: int | None = None) -> None:
    lines = StepLines(path, resume_step)
    for step in steps:
        lines.append({"step": step, "value": step / 3})
    lines.close()


def test_a_resumed_file_has_each_step_exactly_once(tmp_path: Path):
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    write(whole, range(1, 8))
    write(killed, range(1, 6))  # killed in step 6; the newest checkpoint is that of step 3
    write(killed, range(4, 8), resume_step=3)
    assert killed.read_bytes() == whole.read_bytes()


@given(
    kills=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 30)), max_size=4),
    last=st.integers(1, 9),
)
@settings(max_examples=40, deadline=None)
def test_any_sequence_of_kills_and_resumes_leaves_the_file_of_an_unbroken_run(kills, last):
    with tempfile.TemporaryDirectory() as folder:
        path, whole = Path(folder) / "x.jsonl", Path(folder) / "whole.jsonl"
        done, resume_step = 0, None
        for reached, checkpoint, torn in kills:
            reached = max(done, min(reached, last))
            write(path, range(done + 1, reached + 1), resume_step)
            with path.open("ab") as file:
                file.write(b'{"step": 99, "value": 0.1, "text": "cut off'[:torn])  # killed while writing
            done = resume_step = min(checkpoint, reached)
        write(path, range(done + 1, last + 1), resume_step)
        write(whole, range(1, last + 1))
        assert path.read_bytes() == whole.read_bytes()


def test_a_fresh_run_keeps_the_file_of_an_older_one_aside(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    for first in (1, 11, 21):
        write(path, range(first, first + 2))
    steps = {p.name: [r["step"] for r in read_steps(p)] for p in tmp_path.iterdir()}
    assert steps == {"metrics.1.jsonl": [1, 2], "metrics.2.jsonl": [11, 12], "metrics.jsonl": [21, 22]}


def test_a_line_is_on_disk_when_append_returns(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    lines = StepLines(path, None)
    lines.append({"step": 1})
    assert path.read_text() == '{"step": 1}\n'  # not closed yet


@pytest.mark.parametrize("line", ["not json", "[1]", '{"value": 1}', '{"step": "1"}', ""])
def test_a_bad_line_in_the_middle_is_named_by_file_and_number(tmp_path: Path, line: str):
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl:2: "):
        StepLines(path, 2)


def test_numbers_survive_and_non_finite_ones_are_words_in_valid_json(tmp_path: Path):
    tracker = JsonlTracker(Destination(tmp_path, None))
    tracker.log(1, {"b": 0.1 + 0.2, "a": math.nan, "c": -math.inf, "d": 1e-300})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert record == {"step": 1, "a": "nan", "b": 0.1 + 0.2, "c": "-inf", "d": 1e-300}
    assert list(record) == ["step", "a", "b", "c", "d"]  # sorted: equal runs give equal files


def test_text_that_utf8_cannot_spell_survives_a_resume(tmp_path: Path):
    for resume_step in (None, 1):
        lines = StepLines(tmp_path / "x.jsonl", resume_step)
        lines.append({"step": 2 if resume_step else 1, "error": "\ud800 é"})
        lines.close()
    assert [record["error"] for record in read_steps(tmp_path / "x.jsonl")] == ["\ud800 é"] * 2


def test_jsonl_writes_samples_and_a_summary(tmp_path: Path):
    tracker = JsonlTracker(Destination(tmp_path, None))
    tracker.log_samples(3, [Sample(domain="math", prompt="1 + 1 =", response=" 2 ☃", reward=1.0)])
    tracker.finish({"steps": 3.0})
    assert read_steps(tmp_path / "samples.jsonl") == [
        {"step": 3, "domain": "math", "prompt": "1 + 1 =", "response": " 2 ☃", "reward": 1.0}
    ]
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 3.0}


def test_comparable_metrics_leave_out_what_depends_on_the_machine(tmp_path: Path):
    tracker = JsonlTracker(Destination(tmp_path, None))
    tracker.log(1, {"reward/mean": 0.5, "time/step": 3.2, "throughput/tokens_per_second": 9.0, "memory/host_gib": 1.0})
    assert comparable_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/mean": 0.5}]


def test_dropped_items_are_all_counted_and_the_first_of_each_reason_written(tmp_path: Path):
    drops = DropLog(tmp_path, None)
    for row in range(5):
        drops.add("too_long", f"data.jsonl:{row}", "900 tokens, limit 512", {"prompt": "x" * 3})
    drops.add("zero_signal", "math:7", "all rewards 0.0")
    assert drops.close_step(4) == {"dropped/too_long": 5.0, "dropped/zero_signal": 1.0}
    drops.add("zero_signal", "math:9")
    assert drops.close_step(5) == {"dropped/zero_signal": 1.0}
    assert drops.close_step(6) == {}
    drops.close()
    records = read_steps(tmp_path / "dropped.jsonl")
    assert [(r["step"], r["reason"], r["item"], r["count"]) for r in records] == [
        (4, "too_long", "data.jsonl:0", 5),
        (4, "too_long", "data.jsonl:1", 5),
        (4, "too_long", "data.jsonl:2", 5),
        (4, "zero_signal", "math:7", 1),
        (5, "zero_signal", "math:9", 1),
    ]
    assert records[0]["sample"] == {"prompt": "xxx"}
    assert records[0]["detail"] == "900 tokens, limit 512"


def test_a_resumed_drop_log_forgets_the_steps_that_run_again(tmp_path: Path):
    for resume_step, steps in ((None, (1, 2, 3)), (1, (2, 3))):
        drops = DropLog(tmp_path, resume_step)
        for step in steps:
            drops.add("failed", f"task {step}")
            drops.close_step(step)
        drops.close()
    assert [r["step"] for r in read_steps(tmp_path / "dropped.jsonl")] == [1, 2, 3]
