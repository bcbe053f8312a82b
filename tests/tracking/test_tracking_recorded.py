"""`roll.rollouts`: what a run has recorded, read back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import roll
from roll.tracking.rollouts import columns, write_rollouts

ROW = {"row_id": "t#0", "task_id": "t", "reward": 1.0, "reward_parts": {"correct": 1.0}, "token_ids": [5, 6]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (1, 3):
        write_rollouts(
            tmp_path / "rollouts", step, [ROW, ROW | {"row_id": "t#1", "reward": 0.0}], notes={"values": "none"}
        )
    write_rollouts(tmp_path / "rollouts", 0, [ROW], kind="validation")
    return tmp_path


def test_steps_tables_rows_and_notes_of_a_run(folder):
    found = roll.rollouts(folder)
    assert (found.steps, found.validations) == ([1, 3], [0])
    table = found.table(columns=["step", "reward"])
    assert table.to_pydict() == {"step": [1, 1, 3, 3], "reward": [1.0, 0.0, 1.0, 0.0]}
    assert found.table(3).column_names == list(columns())
    assert [row["row_id"] for row in found.rows([3])] == ["t#0", "t#1"]
    row = found.row(3, "t#1")
    assert (row["reward"], row["reward_parts"], row["token_ids"]) == (0.0, {"correct": 1.0}, [5, 6])
    assert found.notes(1) == {"values": "none"}
    assert found.table(kind="dropped").num_rows == 0
    assert next(found.rows(kind="validation"))["kind"] == "validation"


def test_a_run_says_where_its_rollouts_are_also_after_it_was_moved(folder, tmp_path):
    (folder / "rollouts").rename(folder / "elsewhere")
    (folder / "logs").mkdir()
    (folder / "logs" / "run.json").write_text(json.dumps({"rollouts": "../elsewhere"}))
    assert roll.rollouts(str(folder)).steps == [1, 3]
    assert roll.rollouts(folder / "elsewhere").steps == [1, 3]


def test_what_is_not_there_is_said(folder, tmp_path):
    found = roll.rollouts(folder)
    with pytest.raises(ValueError, match=r"no rollouts of step 2; there are 1, 3"):
        found.table(2)
    with pytest.raises(ValueError, match="no column 'rewards'"):
        found.table(columns=["rewards"])
    with pytest.raises(ValueError, match="step 1 has no row 't#9'"):
        found.row(1, "t#9")
    with pytest.raises(ValueError, match="there is no folder"):
        roll.rollouts(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="rollout_dump_dir=<output_dir>/rollouts"):
        roll.rollouts(tmp_path / "empty")


def test_reading_loads_no_torch(folder):
    script = f"import sys, roll; roll.rollouts({str(folder)!r}).table(); print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], check=True, timeout=60, capture_output=True, text=True)
    assert not {"torch", "ray", "transformers"} & set(ran.stdout.split())


def test_pandas_reads_the_files(folder):
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_parquet(folder / "rollouts" / "rollouts-000003.parquet")
    assert frame["reward"].tolist() == [1.0, 0.0] and list(frame["token_ids"][0]) == [5, 6]
