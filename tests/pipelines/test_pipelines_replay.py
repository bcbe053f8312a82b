"""Runs that train on recorded episodes are the run bit for bit, or the same data under other keys."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from same_runs import comparable
from test_pipelines_branches import FORK, episode, task, turn
from test_pipelines_multi_agent import write_duel
from test_pipelines_resume import AGENTIC
from test_pipelines_rollout import TWICE
from toy import metrics_of, run_toy, write_toy
from toy_env import faulty, write_toy_env

import roll
from roll.configs.parsing.loader import load_config
from roll.pipelines.rl.engine_pipeline import EnginePipeline
from roll.pipelines.rl.replay_pipeline import require_fitting
from roll.pipelines.rollouts.assemble import Rollouts, assemble
from roll.pipelines.rollouts.recorded_rollouts import RecordingError, read_step, token_texts
from roll.pipelines.rollouts.rollout_rows import Texts, training_rows
from roll.tracking.recorded_responses import RecordedRollouts
from roll.tracking.rollouts import METADATA_KEY, write_rollouts
from roll.types.trajectory import Group, Trajectory
from roll.workbench.view.api import Api
from roll.workbench.view.runs import named_runs

STATEFUL = (
    "max_steps=3",
    "save_steps=1",
    "checkpoint_config.max_to_keep=null",
    "rollout_batch_size=4",
    "num_return_sequences_in_group=4",
    "actor_train.training_args.per_device_train_batch_size=4",
    "actor_train.training_args.gradient_accumulation_steps=2",
    "actor_train.training_args.lr_scheduler_type=cosine",
    "reward_norm=running",
    "add_token_level_kl=true",
    "init_kl_coef=0.1",
    "target_kl=0.01",
    "reference.infer_batch_size=16",
    "pf_ppo.reweight_method=pow",
)
"""Two updates a step, and all that one step leaves to the next."""
UPDATE = ("actor/", "critic/", "advantage/", "kl/", "reward/", "response/", "group/", "mismatch/", "staleness/")


def recorded(folder: Path, *keys: str) -> Path:
    """Run what is in a folder, recording into its output."""
    run_toy(folder, *keys, f"rollout_dump_dir={folder}/output/rollouts")
    return folder


def replayed(folder: Path, name: str, *keys: str, steps: str = "") -> list[dict]:
    """Rows of a replay of that run, into another folder beside its output."""
    place = folder / name
    more = (f"replay_from={folder}/output{steps}", f"output_dir={place}", f"rollout_dump_dir={place}/rollouts")
    return run_toy(folder, *keys, *more)


def check_same(folder: Path, name: str, first: int = 1) -> None:
    """Every number of the update, the exported weights, and what both have recorded."""
    original = {row["step"]: row for row in comparable(metrics_of(folder / "output" / "logs")) if row["step"] >= first}
    rows = comparable(metrics_of(folder / name / "logs"))
    assert [row["step"] for row in rows] == list(original)
    for row in rows:
        theirs = original[row["step"]]
        assert {key: value for key, value in row.items() if theirs.get(key) != value} == {}
        assert [key for key in theirs if key.startswith(UPDATE) and key not in row] == []
        assert {"actor/loss", "actor/grad_norm"} < set(row)
    mine, theirs = (load_file(folder / run / "hf_model" / "model.safetensors") for run in (name, "output"))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
    again, before = (roll.rollouts(folder / run).table(range(first, len(original) + first)) for run in (name, "output"))
    assert again.drop_columns("trace").to_pylist() == before.drop_columns("trace").to_pylist()


@pytest.fixture(scope="module")
def stateful(tiny_model, tmp_path_factory) -> Path:
    """A run of three steps with a state, and its replay without the reward's file and without an engine."""
    folder = recorded(write_toy(tmp_path_factory.mktemp("replay"), tiny_model), *STATEFUL)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("roll.strategies.engines.hf.hf_infer.HfInfer.__init__", None)
        patched.setattr(EnginePipeline, "__init__", None)
        for name in ("case_reward.py", "case.jsonl"):
            (folder / name).rename(folder / f"{name}.away")
        replayed(folder, "again", *STATEFUL)
    for name in ("case_reward.py", "case.jsonl"):
        (folder / f"{name}.away").rename(folder / name)
    return folder


def test_a_replay_is_the_run_bit_for_bit_without_engine_data_and_reward(stateful):
    check_same(stateful, "again")


def test_one_step_from_the_checkpoint_before_it_is_that_step(stateful):
    before = stateful / "output" / "checkpoints" / "checkpoint-2"
    replayed(stateful, "third", *STATEFUL, f"resume_from_checkpoint={before}", steps=":3")
    check_same(stateful, "third", first=3)


def test_a_replay_goes_on_from_its_own_checkpoint(stateful):
    replayed(stateful, "resumed", *STATEFUL, "save_steps=2", steps=":1-2")
    replayed(stateful, "resumed", *STATEFUL, "resume_from_checkpoint=auto")
    check_same(stateful, "resumed")
    with pytest.raises(ValueError, match=r"was saved by a replay of .*output, which has no place in the training"):
        run_toy(stateful, *STATEFUL, f"output_dir={stateful}/resumed", "max_steps=4", "resume_from_checkpoint=auto")


def test_another_estimator_learns_from_the_same_episodes(stateful, caplog, capsys):
    keys = (*STATEFUL, "adv_estimator=rloo", "val_before_train=true", "eval_steps=1", "max_steps=4")
    rows = replayed(stateful, "rloo", *keys, steps=":2")
    theirs = metrics_of(stateful / "output" / "logs")[1]
    assert [row["step"] for row in rows] == [theirs["step"]] == [2], "nothing is validated"
    assert rows[0]["reward/mean"] == theirs["reward/mean"] and rows[0]["actor/loss"] != theirs["actor/loss"]
    assert "step 2 was played with the weights after step 1, and is replayed with those that training" in caplog.text
    assert "schedules are made for 4 steps, and those of the run were for 3" in caplog.text
    assert "toy: 1 steps in" in capsys.readouterr().err


def test_the_page_compares_a_run_with_its_replay(stateful):
    api = Api(named_runs([stateful / "output", stateful / "again", stateful / "rloo"]))
    row = next(roll.rollouts(stateful / "output").rows(2))
    found = [api.answer(f"/api/runs/{run}/task", {"task": [row["task_id"]]})["rows"] for run in range(3)]
    assert found[0] == found[1] and [one["step"] for one in found[0]] == sorted(one["step"] for one in found[0])
    asked = {"kind": ["train"], "step": ["2"], "row": ["0"]}
    mine, same, other = (api.answer(f"/api/runs/{run}/episode", asked) for run in range(3))
    assert mine["token_ids"] == same["token_ids"] == other["token_ids"] == row["token_ids"]
    assert mine["columns"] == same["columns"] and mine["columns"]["advantages"] != other["columns"]["advantages"]
    curves = [api.answer(f"/api/runs/{run}/metrics", {"name": ["actor/loss"]}) for run in range(2)]
    assert curves[0] == curves[1] and len(curves[0]["values"]["actor/loss"]) == 3


def run_forks(folder: Path, model: Path) -> tuple[str, ...]:
    write_toy(folder, model)
    (folder / "forks.py").write_text(TWICE)
    return (f"rewards.case.rollout='{folder}/forks.py:Forks'", "sequence_length=40", "max_steps=2")


def run_letters(folder: Path, model: Path) -> tuple[str, ...]:
    write_toy_env(folder, model)
    return (*AGENTIC, *faulty(folder, "raise", share=0.05), "max_steps=2", "eval_steps=0")


def run_duel(folder: Path, model: Path) -> tuple[str, ...]:
    write_duel(folder, model)
    return ("max_steps=2", "actor_train.training_args.gradient_accumulation_steps=1")


@pytest.mark.parametrize("write", [run_forks, run_letters, run_duel])
def test_branches_contexts_and_roles_that_are_paid_apart_are_replayed(write, tiny_model, tmp_path):
    keys = write(tmp_path, tiny_model)
    recorded(tmp_path, *keys)
    replayed(tmp_path, "again", *keys)
    check_same(tmp_path, "again")


# --- files by themselves ----------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer of letters."""

    chat_template = None

    def decode(self, ids):
        return "".join(chr(97 + token % 26) for token in ids)


def kept(folder: Path, rollouts: Rollouts, step: int = 1) -> RecordedRollouts:
    write_rollouts(folder, step, training_rows(rollouts, Texts(Letters())), token_text=Texts(Letters()).of_tokens)
    return RecordedRollouts(folder)


def check_equal(mine: Rollouts, theirs: Rollouts) -> None:
    assert mine.batch.row_ids == theirs.batch.row_ids and mine.batch.unit_ids == theirs.batch.unit_ids
    assert mine.batch.group_ids == theirs.batch.group_ids and mine.row_turns == theirs.row_turns
    assert torch.equal(mine.group_index, theirs.group_index) and torch.equal(mine.batch.offsets, theirs.batch.offsets)
    for name, column in theirs.batch.columns().items():
        assert torch.equal(mine.batch.require(name), column), name
    for one, other in zip(mine.trajectories, theirs.trajectories, strict=True):
        # Tokens that the policy didn't draw are recorded without log-probs.
        turns = [
            replace(
                turn,
                logprobs=(0.0,) * turn.num_fire_tokens + turn.logprobs[turn.num_fire_tokens :],
                versions=(-1,) * turn.num_fire_tokens + turn.versions[turn.num_fire_tokens :],
            )
            for turn in other.turns
        ]
        assert one == replace(other, turns=tuple(turns))


def hand_made() -> list[Trajectory]:
    """A fork; contexts that are reset, one without a token in the middle and one at the end, paid; first tokens that
    another distribution gave; an empty turn before a branch that goes on."""
    reset = (
        turn([5], reward=0.5),
        turn([], prompt=[8, 8], resets_context=True, reward=0.25, finish_reason="length"),
        turn([6], resets_context=True, metrics={"actions": 1.0}),
        turn([], prompt=[3], resets_context=True, reward=-0.125),
    )
    late = (turn([], prompt=[1, 2]), turn([], prompt=[9], after=0), turn([4, 4], after=0, role=""))
    return [
        episode(*FORK, reward=1.0, counts={"agent/mismatch_edited": 1.0}),
        episode(*reset, reward=2.5, member=1, status="truncated", reward_parts={"b": 2.0, "a": 0.5}, answer="x"),
        episode(turn([1, 2, 3], num_fire_tokens=1), turn([7, 7]), member=2, reward=-1.0, explanation="why"),
        episode(*late, member=3),
    ]


def test_what_is_read_is_what_was_trained_on(tmp_path):
    rollouts = assemble([Group(task=task(), trajectories=tuple(hand_made()))])
    check_equal(read_step(kept(tmp_path, rollouts), 1), rollouts)
    greedy = torch.tensor([0.5, math.nan, 0.5, 0.5])
    found = read_step(kept(tmp_path, replace(rollouts, greedy_scores=greedy)), 1)
    assert torch.equal(found.greedy_scores.nan_to_num(9), greedy.nan_to_num(9))


def test_roles_that_are_paid_apart_are_read_as_the_parts_of_one_episode(tmp_path):
    def spoken(member: int) -> Trajectory:
        turns = (turn([5], role="x"), turn([6, 6], role="o"), turn([7], role="x"))
        return episode(*turns, member=member, role_rewards={"x": 1.0 - member, "o": -1.0}, counts={"agent/calls": 2.0})

    members = {name: tuple(replace(spoken(m), task_id=name) for m in (0, 1)) for name in "ab"}
    rollouts = assemble([Group(task=task(name), trajectories=played) for name, played in members.items()])
    assert rollouts.batch.unit_ids[0] == "a#0" != rollouts.batch.row_ids[0]
    check_equal(read_step(kept(tmp_path, rollouts), 1), rollouts)


def altered(tmp_path: Path, change) -> RecordedRollouts:
    rows = training_rows(assemble([Group(task=task(), trajectories=tuple(hand_made()))]), Texts(Letters()))
    change(rows)
    write_rollouts(tmp_path, 1, rows, token_text=Texts(Letters()).of_tokens)
    return RecordedRollouts(tmp_path)


def _set(row: int, **values):
    return lambda rows: rows[row].update(values)


def _turn(row: int, place: int, **values):
    return lambda rows: rows[row]["turns"][place].update(values)


def _logprob(value: float):
    """Of the last token of a row, which the policy chose."""
    return lambda rows: rows[1].update(sampling_logprobs=[*rows[1]["sampling_logprobs"][:-1], value])


BROKEN = {
    "a token too few": (lambda rows: rows[0].update(token_ids=rows[0]["token_ids"][:-1]), "lacks entries in a column"),
    "another mask": (_set(0, action_mask=[True] * 6), "action_mask of row 't#0/0' contradicts"),
    "a row too few": (lambda rows: rows.pop(1), "its episodes are other rows than those it has, e.g. 't#0/0'"),
    "rows in disorder": (lambda rows: rows.append(rows.pop(0)), r"have the turns \[2, 3\]: some are missing"),
    "a row twice": (lambda rows: rows.append(rows[2]), "rows of 't' aren't beside each other"),
    "no reward": (_set(2, reward=math.nan), "no reward that is a number"),
    "a reward beyond float32": (_set(2, reward=1e300), "no reward that is a number"),
    "a greedy reward without end": (_set(2, greedy_reward=math.inf), "greedy_reward that is no number"),
    "another reward": (_set(1, reward=5.0), "another than its episode's rows"),
    "a failed episode": (_set(2, status="env_error"), "status 'env_error', which isn't trained on"),
    "a turn of its own parent": (_turn(0, 1, after=1), "continues turn 1"),
    "a turn twice": (_turn(0, 1, number=0), "is in two rows"),
    "negative lengths": (_turn(0, 0, prompt_tokens=-1), "doesn't begin where"),
    "an unknown end": (_turn(0, 0, finish_reason="rm -rf"), "ended by 'rm -rf'"),
    "a turn's reward beyond float32": (_turn(0, 0, reward=-1e39), "has no reward that is a number"),
    "an endless turn reward": (_turn(0, 0, reward=math.inf), "has no reward that is a number"),
    "a log-prob that is none": (_logprob(math.nan), "row 't#0/1' has the sampling log-prob nan at token"),
    "a token that could not be sampled": (_logprob(-math.inf), "row 't#0/1' has the sampling log-prob -inf at token"),
    "roles": (_set(2, role_rewards={"x": 1.0, "y": 0.0}), "is paid for the roles x, y"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_recording_that_contradicts_itself_is_refused_in_a_sentence(case, tmp_path):
    change, words = BROKEN[case]
    files = altered(tmp_path, change)
    with pytest.raises(RecordingError, match=words) as refused:
        read_step(files, 1)
    assert str(refused.value).startswith(f"{tmp_path / 'rollouts-000001.parquet'} can't be replayed: ")


def test_nesting_and_types_of_a_file_are_taken_as_anybody_may_have_written_them(tmp_path):
    files = altered(tmp_path, lambda rows: [row.update(payload="[" * 100_000, ground_truth="5") for row in rows])
    assert read_step(files, 1).tasks[0].payload == {"ground_truth": "5"}, "as a payload that was cut off"
    (tmp_path / "rollouts-1\u00b2.parquet").touch()
    assert files.steps == [1], "no number"
    path = tmp_path / "rollouts-000001.parquet"
    table = pq.read_table(path)
    texts = pa.array([list(map(str, ids)) for ids in table["token_ids"].to_pylist()])
    pq.write_table(table.set_column(table.schema.names.index("token_ids"), "token_ids", texts), path)
    assert all(isinstance(token, int) for token in token_texts(files, 1))
    pq.write_table(table.replace_schema_metadata({METADATA_KEY: b"[" * 100_000}), path)
    with pytest.raises(RecordingError, match="can't be replayed: maximum recursion depth"):
        read_step(files, 1)


def test_files_that_are_none_or_of_other_versions_are_refused(tmp_path, monkeypatch):
    files = altered(tmp_path, lambda rows: None)
    path = tmp_path / "rollouts-000001.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RecordingError, match="can't be replayed"):
        read_step(files, 1)
    shutil.copy(path, tmp_path / "rollouts-000002.parquet")
    for version, words in ((4, "versions 2 to 3 can be replayed$"), (1, "turns of its episodes aren't recorded")):
        monkeypatch.setattr("roll.tracking.rollouts.SCHEMA_VERSION", version)
        with pytest.raises(RecordingError, match=words):
            read_step(altered(tmp_path, lambda rows: None), 1)
    monkeypatch.setattr("roll.tracking.rollouts.SCHEMA_VERSION", 2)
    with pytest.raises(RecordingError, match="t#0 has several contexts or branches, and version 2"):
        read_step(altered(tmp_path, lambda rows: None), 1)
    single = assemble([Group(task=task(), trajectories=(episode(turn([1, 2]), turn([3]), reward=1.0),))])
    check_equal(read_step(kept(tmp_path, single), 1), single)


MISFITS = {
    "rollout_batch_size=2": "it has 4 groups, and a step has 2: set rollout_batch_size=4",
    "num_return_sequences_in_group=2": "set num_return_sequences_in_group=4",
    "rewards={sums: {name: exact}}": "it has the domain 'case', and this file has sums",
    "sequence_length=4": r"has \d+ tokens, more than sequence_length \(4\)",
    "adv_estimator=remax": "compares an episode with a greedy one",
}


@pytest.mark.parametrize("keys", MISFITS)
def test_a_file_that_the_recording_does_not_fit_is_refused_with_what_to_set(keys, stateful):
    name, _, value = keys.partition("=")
    config = replace(load_config(stateful, "toy", STATEFUL), **{name: _plain(value)})
    with pytest.raises(ValueError, match=MISFITS[keys]):
        require_fitting(config, read_step(roll.rollouts(stateful / "output"), 1), 1)


def _plain(value: str):
    return {"sums": None} if value.startswith("{") else int(value) if value.isdigit() else value


def test_tokens_of_other_weights_than_the_steps_are_refused(stateful):
    config = load_config(stateful, "toy", STATEFUL)
    rollouts = read_step(roll.rollouts(stateful / "output"), 3)
    with pytest.raises(ValueError, match=r"tokens that are 2 weight versions old, and async_generation_ratio \(0\)"):
        require_fitting(config, rollouts, 5)
    with pytest.raises(ValueError, match="tokens of weight version 2, and step 1 trains version 0"):
        require_fitting(config, rollouts, 1)


def test_another_tokenizer_and_a_smaller_vocabulary_are_refused(stateful, tmp_path):
    copied = tmp_path / "output"
    shutil.copytree(stateful / "output", copied)
    rows = list(roll.rollouts(copied).rows(1))
    for texts, more, words in (
        (lambda ids: ["?"] * len(ids), 0, "was '[?]', and is '.*' for the tokenizer of .*: it was recorded with"),
        (None, 0, "tokens and 0 texts of tokens"),
        (lambda ids: ["?"] * len(ids), 10**6, "it was recorded with another model"),
    ):
        if more:
            rows[0]["token_ids"] = [token + more for token in rows[0]["token_ids"]]
        write_rollouts(copied / "rollouts", 1, rows, token_text=texts)
        with pytest.raises(RecordingError, match=words):
            run_toy(stateful, *STATEFUL, f"replay_from={copied}:1", f"output_dir={tmp_path}/mine", "save_steps=0")
