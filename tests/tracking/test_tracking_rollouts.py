"""Rollout files and the closing summary."""

from __future__ import annotations

import dataclasses
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rollout_files import read_rollouts

from roll.tracking.recorded_responses import RecordedRollouts
from roll.tracking.rollouts import (
    METADATA_KEY,
    SCHEMA_VERSION,
    TOKEN_COLUMNS,
    columns,
    delete_oldest,
    file_of,
    write_rollouts,
)
from roll.tracking.run_summary import RunSummary, render

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
        expected = {name: list(value) if isinstance(value, tuple) else value for name, value in put.items()}
        expected |= {"step": 3, "kind": "train", "reward_parts": dict(put["reward_parts"])}
        expected |= {"prompt_end": put["prompt"], "response_start": put["response"]}
        assert {name: vars(got)[name] for name in expected} == expected
        left_out = {name: value for name, value in vars(got).items() if name not in expected}
        assert all(value in (None, "", []) for value in left_out.values()), left_out


def test_other_tools_see_a_fixed_schema_even_without_rows(tmp_path: Path):
    import pyarrow.parquet as pq

    table = pq.read_table(write_rollouts(tmp_path, 0, []))
    assert table.num_rows == 0
    assert set(table.column_names) == set(columns()) > {"step", *ROW}
    assert str(table.schema.field("token_ids").type) == "list<element: int64>"
    assert str(table.schema.field("token_texts").type).startswith("list<element: dictionary<values=string")


def test_a_file_says_its_version_and_why_columns_are_empty(tmp_path: Path):
    import pyarrow.parquet as pq

    path = write_rollouts(tmp_path, 0, [ROW], notes={"values": "no critic"})
    about = json.loads(pq.read_schema(path).metadata[METADATA_KEY])
    assert about == {"version": SCHEMA_VERSION, "notes": {"values": "no critic"}}
    recorded = RecordedRollouts(tmp_path)
    assert (recorded.version(0), recorded.notes(0)) == (SCHEMA_VERSION, {"values": "no critic"})
    pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)  # files of version 1 say nothing
    assert (recorded.version(0), recorded.notes(0)) == (1, {})


def test_token_texts_stand_beside_the_ids(tmp_path: Path):
    path = write_rollouts(tmp_path, 0, [ROW, OTHER, ROW], token_text=lambda ids: [f"<{token}>" for token in ids])
    assert [row.token_texts for row in read_rollouts(path)] == [["<5>", "<6>", "<7>"], [], ["<5>", "<6>", "<7>"]]


def test_text_that_no_file_takes_is_escaped(tmp_path: Path):
    turn = {"number": 0, "observation": "\udce4", "metrics": [("a\ud800", 1.0)]}
    row = ROW | {"response": "half a pair: \ud800", "turns": [turn], "reward_parts": {"\udfff": 2.0}}
    (got,) = read_rollouts(write_rollouts(tmp_path, 0, [row], token_text=lambda ids: ["\ud800"] * len(ids)))
    assert got.response == "half a pair: \\ud800"
    assert got.turns[0]["observation"] == "\\udce4" and got.turns[0]["metrics"] == [("a\\ud800", 1.0)]
    assert got.reward_parts == {"\\udfff": 2.0} and got.token_texts == ["\\ud800"] * 3


def test_a_row_of_a_large_step_is_read_without_the_others(tmp_path: Path):
    import pyarrow.parquet as pq

    long = ROW | {
        name: [value[0]] * 30_000 for name, value in ROW.items() if name in (*TOKEN_COLUMNS, "token_ids") and value
    }
    parquet = pq.ParquetFile(write_rollouts(tmp_path, 0, [long] * 7))
    # 65,536 tokens hold two rows of 30,000.
    assert [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)] == [2, 2, 2, 1]


def test_the_oldest_steps_are_deleted_when_the_folder_is_too_large(tmp_path: Path):
    for step in (1, 2, 3):
        write_rollouts(tmp_path, step, [ROW])
    write_rollouts(tmp_path, 1, [ROW], kind="dropped")
    (tmp_path / "notes-000001.parquet").touch()  # somebody else's
    size = file_of(tmp_path, 3).stat().st_size
    assert delete_oldest(tmp_path, 2 * size, keep=3) == [1]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"rollouts-000002.parquet", "rollouts-000003.parquet", "notes-000001.parquet"}
    assert delete_oldest(tmp_path, 0, keep=3) == [2] and file_of(tmp_path, 3).is_file()


def test_a_step_that_runs_again_replaces_its_file_and_equal_rows_give_equal_bytes(tmp_path: Path):
    first = write_rollouts(tmp_path, 3, [ROW]).read_bytes()
    write_rollouts(tmp_path, 3, [ROW, OTHER])
    assert write_rollouts(tmp_path, 3, [ROW]).read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == ["rollouts-000003.parquet"]


def test_a_write_that_is_cut_off_leaves_the_earlier_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import pyarrow.parquet as pq

    def cut_off(_table, where: Path, **_options: object) -> None:
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
    assert lines[1:4] == [["validation", "accuracy"], ["a", "50.0%"], ["b", "25.0%"]]


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
