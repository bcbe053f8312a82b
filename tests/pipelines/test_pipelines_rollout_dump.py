"""What a run writes into `rollout_dump_dir`, from the run itself."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from small import run_small

import roll
from roll.pipelines.rollouts.assemble import assemble
from roll.pipelines.rollouts.rollout_dump import RolloutDump
from roll.pipelines.rollouts.rollout_rows import Texts, played_rows, training_rows
from roll.tracking.rollouts import TOKEN_COLUMNS, file_of, write_rollouts
from roll.types.trajectory import Group, Task, Trajectory, Turn
from roll.utils.disk import disk_full_sentence, is_disk_full

EXPLAINS = """
def case(response, task):
    score = sum(map(str.islower, response[:2])) / 2
    return {"score": score, "explanation": f"{score * 2:g} of 2 are lower case"}
"""
FAILS = """
def case(response, task):
    if ord(response[0]) % 3 == 0:
        raise RuntimeError("no judge today")
    return 0.5
"""


@pytest.fixture(scope="module")
def recorded(tiny_model, tmp_path_factory):
    """Two steps with what is computed for the files alone, and the same run without that."""
    folder = tmp_path_factory.mktemp("recorded")
    keys = ("max_steps=2", "eval_steps=2", "val_before_train=true")
    asked = "rollout_dump_outputs=[old_logprobs,entropies]"
    run = run_small(folder / "a", tiny_model, *keys, asked, dump=True, reward=EXPLAINS)
    return run, run_small(folder / "b", tiny_model, *keys, dump=True, reward=EXPLAINS)


def test_a_row_has_its_task_its_turns_and_why_it_got_its_reward(recorded):
    run, _ = recorded
    found = roll.rollouts(run.folder / "dump")
    assert (found.steps, found.validations) == ([1, 2], [0, 2])
    for row in found.rows():
        assert json.loads(row["payload"])["ground_truth"] == row["ground_truth"] in ("lower", "upper")
        assert row["explanation"] == f"{row['reward'] * 2:g} of 2 are lower case"
        (turn,) = row["turns"]
        assert row["prompt"] == turn["prompt"] and row["response"] == turn["response"]
        assert (turn["start"], turn["prompt_tokens"] + turn["response_tokens"]) == (0, len(row["token_ids"]))
        assert turn["reward"] == row["reward"] and turn["finish_reason"] == row["finish_reason"]
        assert "".join(row["token_texts"]) == row["prompt"] + row["response"]
        assert row["num_response_tokens"] == sum(row["action_mask"]) == turn["response_tokens"]
        acting = [value for value, on in zip(row["advantages"], row["action_mask"], strict=True) if on]
        assert row["advantage"] == pytest.approx(sum(acting) / len(acting))
        assert row["version_min"] == row["version_max"] == row["step"] - 1
        assert row["kind"] == "train" and row["dropped"] == "" and row["loss_mask"] == row["action_mask"]


def test_outputs_for_the_files_alone_are_the_trainers_and_change_nothing_else(recorded):
    run, plain = recorded
    assert all(torch.equal(run.weights()[name], value) for name, value in plain.weights().items())
    for mine, other in zip(
        roll.rollouts(run.folder / "dump").rows(), roll.rollouts(plain.folder / "dump").rows(), strict=True
    ):
        assert mine["advantages"] == other["advantages"] and other["old_logprobs"] == other["entropies"] == []
        on = [at for at, acting in enumerate(mine["action_mask"]) if acting]
        assert all(mine["entropies"][at] > 0 for at in on)
        # hf_infer in float32 and the trainer compute the same log-probs.
        apart = [abs(mine["old_logprobs"][at] - mine["sampling_logprobs"][at]) for at in on]
        assert max(apart) < 1e-4 and mine["mismatch_max"] == pytest.approx(max(apart))
        assert other["mismatch_max"] is None


def test_a_file_says_why_columns_are_empty(recorded):
    run, plain = recorded
    notes = roll.rollouts(plain.folder / "dump").notes(1)
    assert (
        "rollout_dump_outputs: [old_logprobs]" in notes["old_logprobs"]
        and "one optimizer step" in notes["old_logprobs"]
    )
    assert notes["ref_logprobs"] == "the run has no reference model"
    assert not {"old_logprobs", "entropies", "advantages"} & set(roll.rollouts(run.folder / "dump").notes(1))
    for row in roll.rollouts(plain.folder / "dump").rows(1):
        empty = {name for name in TOKEN_COLUMNS if not row[name]}
        assert empty == set(notes), "every empty column has a note, and no other"


def test_a_validation_is_recorded_with_the_step_after_which_it_was(recorded):
    run, _ = recorded
    rows = list(roll.rollouts(run.folder / "dump").rows(2, kind="validation"))
    assert len(rows) == 16 and all(row["advantage"] is None and row["advantages"] == [] for row in rows)
    assert all(row["sampling_logprobs"] and row["explanation"] for row in rows)
    assert sum(row["reward"] for row in rows) / 16 == pytest.approx(run.last["val/case/reward"])


def test_failed_and_filtered_episodes_are_recorded_with_the_reason(tiny_model, tmp_path):
    run = run_small(
        tmp_path,
        tiny_model,
        "num_return_sequences_in_group=8",
        "actor_train.training_args.per_device_train_batch_size=16",
        dump=True,
        reward=FAILS,
    )
    found = roll.rollouts(run.folder / "dump")
    rows = list(found.rows(kind="dropped"))
    assert rows and all(row["status"] == "reward_error" and "no judge today" in row["dropped"] for row in rows)
    assert all(row["token_ids"] and row["response"] for row in rows)
    filtering = (
        "rewards.case.query_filter_config={type: mean_filter, filter_args: {threshold_down: 0.1, threshold_up: 2}}"
    )
    constant = 'def case(response, task):\n    return float(task.payload["prompt"][0] in "13579")\n'
    run = run_small(tmp_path / "filtered", tiny_model, filtering, "max_steps=3", dump=True, reward=constant)
    rows = list(roll.rollouts(run.folder / "dump").rows(kind="dropped"))
    assert rows and all(row["dropped"].startswith("filtered: mean score outside") for row in rows)
    assert {row["reward"] for row in rows} == {0.0} and all(row["status"] in ("ok", "truncated") for row in rows)


def test_the_folder_stays_below_its_limit(tiny_model, tmp_path):
    run = run_small(tmp_path, tiny_model, "max_steps=3", "rollout_dump_gib=1e-6", dump=True)
    assert roll.rollouts(run.folder / "dump").steps == [3]  # the last one always stays


def test_a_run_tells_where_its_rollouts_are_and_how_it_ended(recorded):
    run, _ = recorded
    logs = run.folder / "output" / "logs"
    about, live = (json.loads((logs / name).read_text()) for name in ("run.json", "live.json"))
    assert (about["exp_name"], about["total_steps"], about["pipeline"]) == ("toy", 2, "rlvr")
    assert (logs / about["rollouts"]).resolve() == (run.folder / "dump").resolve()
    assert (live["doing"], live["outcome"], live["step"]) == (["ended"], "finished", 2)
    assert roll.rollouts(run.folder / "output").steps == [1, 2]


def test_a_new_run_moves_aside_what_another_has_recorded_and_a_resumed_one_goes_on(tiny_model, tmp_path, caplog):
    keys = ("max_steps=1", "eval_steps=1", "val_before_train=true", "save_steps=1")
    with caplog.at_level(logging.WARNING, logger="roll"):
        run_small(tmp_path, tiny_model, *keys, dump=True)
        assert "rollouts of an earlier run" not in caplog.text
        first = {file.name: file.read_bytes() for file in (tmp_path / "dump").glob("*.parquet")}
        run_small(tmp_path, tiny_model, *keys, "seed=7", f"output_dir={tmp_path / 'second'}", dump=True)
    assert f"the rollouts of an earlier run were moved to {tmp_path / 'dump' / 'earlier.1'}" in caplog.text
    aside = tmp_path / "dump" / "earlier.1"
    assert {file.name: file.read_bytes() for file in aside.iterdir()} == first
    again = ("max_steps=2", "seed=7", "resume_from_checkpoint=true", f"output_dir={tmp_path / 'second'}")
    run_small(tmp_path, tiny_model, *again, dump=True)
    assert roll.rollouts(tmp_path / "dump").steps == [1, 2] and roll.rollouts(aside).steps == [1]


def test_pictures_of_an_earlier_run_are_moved_aside(tmp_path):
    class Config:
        extra_output_dirs = {"render_save_dir": str(tmp_path)}

    (tmp_path / "step-000000" / "t:1").mkdir(parents=True)
    (tmp_path / "step-000000" / "t:1" / "episode.png").write_bytes(b"first")
    for _ in range(2):  # the second time there is nothing to move
        RolloutDump(Config(), Letters()).set_earlier_aside()
    assert [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.png")] == [
        "earlier.1/step-000000/t:1/episode.png"
    ]


def test_a_full_disk_is_told_with_the_folder_of_the_rollouts(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("there is no device that is always full")
    file_of(tmp_path, 1).with_suffix(".parquet.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError) as raised:
        write_rollouts(tmp_path, 1, [{"row_id": "t#0"}])
    assert is_disk_full(raised.value)
    assert f"are free in {tmp_path};" in disk_full_sentence(raised.value, [Path("/proc")])


class Letters:
    """A tokenizer whose token 1 is `a`, and so on."""

    chat_template = None

    def decode(self, ids):
        return "".join(chr(96 + token) for token in ids)


def test_calls_of_tools_are_read_from_a_response():
    texts = Texts(Letters())
    text = 'a<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    (call,) = texts.tool_calls(text)
    assert call["name"] == "add" and json.loads(call["arguments"]) == {"a": 1}
    assert texts.tool_calls("<think>" + text + "</think> no call") == []
    assert texts.tool_calls("<tool_call>" + "[" * 100_000) == []


def test_branches_are_rows_whose_shared_turns_are_context():
    def turn(prompt, response, **more):
        given = {"logprobs": (-0.5,) * len(response), "versions": (3,) * len(response), "finish_reason": "stop"}
        return Turn(prompt_ids=prompt, response_ids=response, **given, **more)

    turns = (turn((1,), (2,)), turn((3,), (4,)), turn((5,), (6, 7), after=0, role="critic"))
    task = Task(id="t", source="s", payload={"a": object}, seed=2**64, tag="t", domain="d")
    played = Trajectory(task_id="t", member=0, turns=turns, reward=1.0, explanation="why", counts={"agent/calls": 3.0})
    rows = played_rows(task, [played], Texts(Letters()), "too easy")
    assert [row["row_id"] for row in rows] == ["t#0/0", "t#0/1"]
    first, second = rows
    assert first["token_ids"].tolist() == [1, 2, 3, 4] and first["action_mask"].tolist() == [False, True, False, True]
    assert second["token_ids"].tolist() == [1, 2, 5, 6, 7]
    assert second["action_mask"].tolist() == [False, False, False, True, True]
    assert second["sampling_logprobs"].tolist() == [0, 0, 0, -0.5, -0.5]
    assert second["versions"].tolist() == [-1, -1, -1, 3, 3]
    assert (second["prompt"], second["response"]) == ("abe", "fg")
    about = [(one["number"], one["shared"], one["start"], one["after"], one["role"]) for one in second["turns"]]
    assert about == [(0, True, 0, None, ""), (2, False, 2, 0, "critic")]
    assert second["num_response_tokens"] == 2 and second["counts"] == {"agent/calls": 3.0} and second["seed"] is None
    trained = assemble([Group(task=task, trajectories=(played,))])
    columns = ("token_ids", "action_mask", "sampling_logprobs", "versions", "turns", "prompt", "response")
    for mine, other in zip(training_rows(trained, Texts(Letters())), rows, strict=True):
        assert mine["row_id"] == other["row_id"] and "dropped" not in mine and other["dropped"] == "too easy"
        for name in columns:
            assert list(mine[name]) == list(other[name]), name


def test_a_run_tells_where_its_pictures_are(tmp_path):
    class Config:
        exp_name, pipeline, seed = "x", "agentic", 1
        logging_path, output_path = tmp_path / "out" / "logs", tmp_path / "out"
        extra_output_dirs = {"render_save_dir": str(tmp_path / "out" / "pictures")}

    about = RolloutDump(Config(), Letters()).about(3)
    assert (about["pictures"], about["rollouts"], about["output_dir"]) == ("../pictures", None, "..")
