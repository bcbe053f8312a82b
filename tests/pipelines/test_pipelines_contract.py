"""What every pipeline must do, asserted once over the jobs of `pipeline_contract.py`.

How rows are laid out, which backend trains and how many ranks there are changes no step, and a run that is resumed is
the run that was never interrupted. Runs that several cases compare with are made once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_contract import EPOCH, JOBS, RANKS, TRAINING, Job, cells
from safetensors.torch import load_file
from same_runs import comparable, exported
from toy import run_toy
from toy_env import episodes

from roll.utils.readers import DataError


@dataclass(frozen=True)
class Finished:
    """A run that has ended."""

    folder: Path
    rows: list[dict[str, Any]]


@pytest.fixture(scope="module")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Finished]:
    """Returns a job's run with further keys, which it makes once."""
    runs: dict[tuple[str, ...], Finished] = {}

    def run(job: str, *keys: str) -> Finished:
        key = (job, *keys)
        if key not in runs:
            folder = JOBS[job].write(tmp_path_factory.mktemp("finished") / "run", tiny_model)
            runs[key] = Finished(folder, run_toy(folder, *JOBS[job].keys, *keys))
        return runs[key]

    return run


def check_same_steps(job: Job, rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, other in zip(rows, expected, strict=True):
        for name in job.metrics:
            assert row.get(name, 0.0) == pytest.approx(other.get(name, 0.0), rel=1e-4, abs=job.abs), name
        assert row.get("mismatch/kl", 0.0) < 1e-9
    assert all(any(name in row for row in expected) for name in job.metrics[:3])


@pytest.mark.parametrize(("name", "layout"), cells("layouts"))
def test_how_rows_are_laid_out_changes_nothing(finished, tiny_model, tmp_path, name, layout):
    job = JOBS[name]
    rows = run_toy(job.write(tmp_path, tiny_model), *job.keys, *job.layouts[layout])
    check_same_steps(job, rows, finished(name).rows)


# Adam must not blow up what rounding leaves of gradients that cancel.
EPSILON = f"{TRAINING}.adam_epsilon=1e-4"


@pytest.mark.parametrize(("name", "backend"), cells("backends"))
def test_every_backend_takes_the_steps_that_fsdp2_takes(finished, tiny_model, tmp_path, name, backend):
    job, unit = JOBS[name], [key for key in JOBS[name].backends[backend] if key.startswith("sample_unit=")]
    expected = finished(name, EPSILON, *unit)
    rows = run_toy(job.write(tmp_path, tiny_model), *job.keys, EPSILON, *job.backends[backend])
    check_same_steps(job, rows, expected.rows)
    if job.models:
        mine, theirs = (folder / "output" / "hf_model" for folder in (tmp_path, expected.folder))
        weights = load_file(mine / "model.safetensors")
        for key, value in load_file(theirs / "model.safetensors").items():
            torch.testing.assert_close(weights[key], value, rtol=1e-3, atol=1e-4)
        mine, theirs = (json.loads((model / "config.json").read_text()) for model in (mine, theirs))
        assert mine == theirs


@pytest.mark.parametrize(("name", "variant"), cells("resumed"))
def test_a_resumed_run_equals_one_that_was_never_interrupted(tiny_model, tmp_path, name, variant):
    job, folders = JOBS[name], (tmp_path / "whole", tmp_path / "parts")
    whole, parts = (job.write(folder, tiny_model) for folder in folders)
    keys = (*job.keys, "save_steps=2", *(["eval_steps=2"] if "eval_steps=3" in job.keys else []), *job.resumed[variant])
    expected = run_toy(whole, *keys, "max_steps=4")
    run_toy(parts, *keys, "max_steps=2")
    rows = run_toy(parts, *keys, "max_steps=4", "resume_from_checkpoint=auto")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    mine, theirs = comparable(rows), comparable(expected)
    if job.same:
        mine, theirs = ([[row[name] for name in job.same] for row in side] for side in (mine, theirs))
    assert mine == theirs
    assert exported(parts) == exported(whole)
    assert exported(whole)
    mine, theirs = ([(row.token_ids, row.advantages) for row in episodes(folder)] for folder in folders)
    assert mine == theirs


OF_RANKS = (
    *("reward/mean", "reward/std", "actor/loss", "actor/pg_loss", "actor/kl_loss", "kl/reference"),
    *("env/letters/actions", "sft/loss", "sft/rows", "preference/loss", "preference/kl", "preference/rows"),
)


@pytest.mark.parametrize("name", RANKS)
def test_two_ranks_under_ray_take_the_steps_of_one(shared_ray, tiny_model, tmp_path, name):
    ranks = RANKS[name]
    job, write = JOBS[ranks.job], ranks.write or JOBS[ranks.job].write
    one, two = (write(tmp_path / folder, tiny_model) for folder in ("one", "two"))
    keys, of_the_actor = (*job.keys, *ranks.keys), ["actor_train.device_mapping='0-1'"] if ranks.of_the_actor else []
    alone = run_toy(one, *keys, *ranks.alone)
    together = run_toy(two, *keys, "executor=ray", "num_gpus_per_node=2", *of_the_actor, *ranks.together)
    of_rows = "sft" in ranks.job or "preference/loss" in alone[0]
    for mine, theirs in zip(alone, together, strict=True):
        assert [metric in mine for metric in OF_RANKS] == [metric in theirs for metric in OF_RANKS]
        for metric in set(OF_RANKS) & set(mine):
            near = {"rel": 1e-4, "abs": 1e-7} if of_rows else {"abs": 1e-6 if "reward" in metric else 1e-5}
            assert mine[metric] == pytest.approx(theirs[metric], **near), metric
        assert mine["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-3)
    if of_rows:
        assert [row.get("sft/rows", row.get("preference/rows")) for row in together] == [6, 6, 6, 2]
    if name == "kto":
        assert max(row["preference/kl"] for row in together) > 0
    mine, theirs = ([(row.task_id, row.member, row.token_ids) for row in episodes(folder)] for folder in (one, two))
    assert mine == theirs


# --- pipelines of finished rows ---------------------------------------------------------------------------------------

OF_ROWS = {"sft": "sft", "dpo": "preference", "reward_model": "preference"}
"""How their metrics begin."""


@pytest.mark.parametrize(("name", "metrics"), OF_ROWS.items())
def test_epochs_end_with_a_smaller_step_and_take_every_row_once(finished, name, metrics):
    rows = finished(name, *EPOCH, "save_steps=2").rows
    assert [row[f"{metrics}/rows"] for row in rows] == [6, 6, 6, 2]
    assert rows[-1][f"{metrics}/epoch"] == 1.0
    if name != "reward_model":  # which learns a score of each row
        assert rows[0]["data/taught_tokens"] == sum(row[f"{metrics}/tokens"] for row in rows)


@pytest.mark.parametrize("name", OF_ROWS)
def test_other_rows_are_refused_when_a_run_goes_on(finished, tiny_model, name):
    folder, job = finished(name, *EPOCH, "save_steps=2").folder, JOBS[name]
    job.write(folder, tiny_model, rows=21)
    with pytest.raises(DataError, match="the data cursor was saved with rows = '20 rows"):
        run_toy(folder, *job.keys, *EPOCH, "save_steps=2", "resume_from_checkpoint=true")


BAD_ROWS = {
    "sft": ({"question": "1?", "answer": ""}, "the response in 'answer' is empty"),
    "dpo": ({"prompt": "1?", "chosen": "a", "rejected": ""}, "the response in 'rejected' is empty"),
    "reward_model": ({"prompt": "1?", "chosen": "", "rejected": "a"}, "the response in 'chosen' is empty"),
    "kto": ({"prompt": "1?", "completion": "", "label": True}, "the response in 'completion' is empty"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_ends_the_start_with_its_line(tiny_model, tmp_path, name):
    job, (row, message) = JOBS[name], BAD_ROWS[name]
    job.write(tmp_path, tiny_model)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=rf"rows.jsonl:21: {message}"):
        run_toy(tmp_path, *job.keys)
