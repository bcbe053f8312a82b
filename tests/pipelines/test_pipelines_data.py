"""Data keys in real runs: streamed rows, bad rows, a dataset class, curricula, and what a resumed run draws."""

from __future__ import annotations

import json

import pytest
from same_runs import logged
from small import again, row_of, run_small

from roll.utils.rows import DataError

DATA = "actor_train.data_args"
REWARD = "def case(response, task):\n    return float(len(response) % 2)\n"
ROWS = [row_of(i, level=(i * 5) % 7) for i in range(10)]


@pytest.fixture
def small(tiny_model, tmp_path):
    """Runs the toy in a folder of its own."""
    count = iter(range(99))
    return lambda *overrides, **files: run_small(tmp_path / str(next(count)), tiny_model, *overrides, **files)


def test_a_streamed_run_is_the_run_from_memory_and_resumes_it(small):
    keys = ("max_steps=4", "save_steps=2", "checkpoint_config.max_to_keep=null", f"{DATA}.curriculum.by=success")
    memory = small(*keys, data=ROWS, reward=REWARD)
    streamed = small(*keys, f"{DATA}.streaming=true", data=ROWS, reward=REWARD)
    assert streamed.prompts() == memory.prompts()
    assert streamed.column("data/success_rate") == memory.column("data/success_rate") != []
    # A half of the run in memory, the other half streamed: the same bits.
    checkpoint = memory.folder / "output" / "checkpoints" / "checkpoint-2"
    rest = again(memory.folder, *keys, f"{DATA}.streaming=true", f"resume_from_checkpoint={checkpoint}")
    assert rest.prompts() == memory.prompts()[len(memory.prompts()) // 2 :]
    assert logged(memory.folder) == logged(streamed.folder)


def test_bad_rows_are_left_out_listed_and_too_many_end_the_run(small, capsys):
    rows = [*ROWS, row_of(10, prompt=""), row_of(11, ground_truth=None)]
    with pytest.raises(DataError, match=r"case\.jsonl:11: the prompt is ''"):
        small(data=rows)
    with pytest.raises(DataError, match=r"2 of 12 rows are bad, and max_bad_rows allows 1; .*bad_rows\.jsonl"):
        small(f"{DATA}.max_bad_rows=1", data=rows)
    with pytest.raises(DataError, match=r"2 of 12 rows are bad, and max_bad_rows allows 10\.000% of the rows"):
        small(f"{DATA}.max_bad_rows=0.1", data=rows)
    run = small(f"{DATA}.max_bad_rows=2", data=rows)
    assert [(row["line"], row["reason"]) for row in run.lines("bad_rows.jsonl")] == [
        (11, "the prompt is '', expected a non-empty string"),
        (12, "column 'ground_truth' (the ground truth) is empty"),
    ]
    assert run.rows[0]["data/rows_bad"] == 2
    assert "bad rows" in capsys.readouterr().err


def test_a_dataset_class_takes_the_place_of_files_and_repeats_are_left_out(small, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(f"class Rows:\n    def __init__(self, count):\n        self.rows = {json.dumps(ROWS)} * count\n"
                    "    def __iter__(self):\n        return iter(self.rows)\n")  # fmt: skip
    keys = (f"{DATA}.file_name=[]", f"{DATA}.dataset={file}:Rows", f"{DATA}.dataset_args.count=2", f"{DATA}.id=row")
    run = small(*keys, f"{DATA}.deduplicate=true", data=ROWS)
    assert run.rows[0]["data/rows_duplicate"] == 10
    assert run.rows[0]["data/prompts"] == 10


def test_easy_rows_come_first(small):
    keys = (f"{DATA}.curriculum.by=column", f"{DATA}.curriculum.column=level", f"{DATA}.curriculum.window=0")
    run = small("max_steps=5", *keys, data=ROWS, dump=True)
    levels = {row["id"]: row["level"] for row in ROWS}
    drawn = [levels[row.task_id.split(":")[1]] for step in range(1, 6) for row in run.rollouts(step)]
    assert drawn == sorted(drawn)
