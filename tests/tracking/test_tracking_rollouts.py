"""Rollout files and the closing summary."""

from __future__ import annotations

import dataclasses
import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rollout_files import read_rollouts

from roll.tracking.rollouts import TOKEN_COLUMNS, write_rollouts
from roll.tracking.summary import RunSummary, render

ROW = {
    "task_id": "math:7",
    "domain": "math",
    "tag": "chain_sum",
    "member": 1,
    "status": "ok",
    "error": "",
    "prompt": "1 + 1 =",
    "response": " 2 ☃",
    "token_ids": [5, 6, 7],
    "action_mask": [False, True, True],
    "sampling_logprobs": [0.0, -0.5, -0.25],
    "old_logprobs": [0.0, -0.5, -0.25],
    "ref_logprobs": [],
    "versions": [-1, 2, 2],
    "advantages": [0.0, 1.5, 1.5],
    "reward": 1.0,
    "reward_parts": [("correct", 1.0), ("format", 0.5)],
}
OTHER = ROW | dict.fromkeys(TOKEN_COLUMNS, ()) | {"task_id": "math:8", "token_ids": [], "reward_parts": []}


def test_rollouts_come_back_as_they_were_written(tmp_path: Path):
    path = write_rollouts(tmp_path / "dump", 3, [ROW, OTHER])
    assert path == tmp_path / "dump" / "rollouts-000003.parquet"
    for got, put in zip(read_rollouts(path), (ROW, OTHER), strict=True):
        columns = {name: list(value) if isinstance(value, tuple) else value for name, value in put.items()}
        assert vars(got) == columns | {"step": 3, "reward_parts": dict(put["reward_parts"])}


def test_other_tools_see_a_fixed_schema_even_without_rows(tmp_path: Path):
    import pyarrow.parquet as pq

    table = pq.read_table(write_rollouts(tmp_path, 0, []))
    assert table.num_rows == 0
    assert set(table.column_names) == {"step", *ROW}
    assert str(table.schema.field("token_ids").type) == "list<element: int64>"


def test_a_step_that_runs_again_replaces_its_file_and_equal_rows_give_equal_bytes(tmp_path: Path):
    first = write_rollouts(tmp_path, 3, [ROW]).read_bytes()
    write_rollouts(tmp_path, 3, [ROW, OTHER])
    assert write_rollouts(tmp_path, 3, [ROW]).read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == ["rollouts-000003.parquet"]


def test_a_write_that_is_cut_off_leaves_the_earlier_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import pyarrow.parquet as pq

    def cut_off(_table, where: Path) -> None:
        where.write_bytes(b"PAR1")
        raise OSError("No space left on device")

    path = write_rollouts(tmp_path, 3, [ROW])
    monkeypatch.setattr(pq, "write_table", cut_off)
    with pytest.raises(OSError, match="No space left"):
        write_rollouts(tmp_path, 3, [OTHER])
    assert read_rollouts(path)[0].token_ids == [5, 6, 7]


SUMMARY = RunSummary(
    exp_name="quickstart",
    steps=40,
    wall_seconds=200.0,
    accuracy_before={"chain_sum": 0.5, "products": 0.25},
    accuracy_after={"chain_sum": 0.75, "products": 0.5},
    tokens=36000,
    step_seconds=150.0,
    spans={"update": 50.0, "generate": 90.0},
    files={"metrics": Path("/runs/x/metrics.jsonl"), "checkpoint": Path("/runs/x/checkpoint-40")},
)


def text_of(summary: RunSummary, width: int = 100) -> list[list[str]]:
    """The words of each line, frames removed."""
    out = io.StringIO()
    Console(file=out, width=width, no_color=True).print(render(summary))
    lines = out.getvalue().translate({ord(c): " " for c in "┃│┡━╇┩┏┳┓└─┴┘├┼┤"}).splitlines()
    return [line.split() for line in lines if line.split()]


def test_the_summary_says_whether_it_learned_how_fast_where_the_time_went_and_where_the_files_are():
    lines = text_of(SUMMARY)
    assert lines == [
        ["quickstart:", "40", "steps", "in", "3", "min", "20", "s"],
        ["240", "tokens/s", "(36,000", "response", "tokens)"],  # 36000 / 150
        ["held-out", "accuracy", "before", "after", "change"],
        ["chain_sum", "50.0%", "75.0%", "+25.0", "points"],
        ["products", "25.0%", "50.0%", "+25.0", "points"],
        ["where", "the", "time", "went", "time", "share"],
        ["generate", "1", "min", "30", "s", "45.0%"],
        ["update", "50.0", "s", "25.0%"],
        ["other", "1", "min", "00", "s", "30.0%"],  # 200 - 90 - 50
        ["metrics", "/runs/x/metrics.jsonl"],
        ["checkpoint", "/runs/x/checkpoint-40"],
    ]


def test_a_summary_without_validation_or_steps_leaves_those_parts_out():
    bare = dataclasses.replace(
        SUMMARY, accuracy_before={}, accuracy_after={}, tokens=0, steps=0, step_seconds=0.0, spans={}, files={}
    )
    assert len(text_of(bare)) == 1


def test_a_mere_validation_has_one_column_and_no_speed():
    only = dataclasses.replace(SUMMARY, steps=0, tokens=0, accuracy_before={}, accuracy_after={"b": 0.25, "a": 0.5})
    lines = text_of(only)
    assert "validation," in lines[0] and "steps" not in lines[0]
    assert lines[1:4] == [["held-out", "accuracy"], ["a", "50.0%"], ["b", "25.0%"]]


def test_a_domain_measured_once_shows_no_change():
    half = dataclasses.replace(SUMMARY, accuracy_before={"chain_sum": 0.5}, accuracy_after={"products": 1.0})
    assert text_of(half)[3:5] == [["chain_sum", "50.0%", "-", "-"], ["products", "-", "100.0%", "-"]]


def test_a_long_path_survives_a_narrow_terminal():
    path = Path("/runs") / ("deep" * 30)
    lines = text_of(dataclasses.replace(SUMMARY, files={"metrics": path}), width=40)
    assert str(path) in "".join(word for line in lines for word in line)


def test_the_final_numbers_for_the_trackers():
    assert SUMMARY.metrics() == {
        "accuracy_before/chain_sum": 0.5,
        "accuracy_before/products": 0.25,
        "accuracy_after/chain_sum": 0.75,
        "accuracy_after/products": 0.5,
        "steps": 40,
        "wall_seconds": 200.0,
        "tokens_per_second": 240.0,
    }


def test_a_run_that_only_validates_has_one_column_with_a_name():
    lines = text_of(replace(SUMMARY, accuracy_before={}))
    header = next(line for line in lines if line[:1] == ["held-out"])
    assert header == ["held-out", "accuracy"]
