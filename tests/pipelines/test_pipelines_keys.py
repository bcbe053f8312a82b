"""Keys that need the loop: schedule, checkpoints, what is written, data. Each is shown to act on the smallest toy."""

from __future__ import annotations

import json
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from small import Run, again, row_of, run_small

from roll.configs.errors import ConfigError
from roll.rollout.engine_driver import RolloutStalled
from roll.rollout.episode_groups import FilterBudgetExhausted
from roll.strategies.hf.fsdp2 import Fsdp2Strategy
from roll.utils.readers import DataError

CONSTANT = "def case(response, task):\n    return {}\n"
DATA = "actor_train.data_args"


@pytest.fixture
def small(tiny_model, tmp_path):
    """Runs the toy in a folder of its own."""
    count = iter(range(99))
    return lambda *overrides, **files: run_small(tmp_path / str(next(count)), tiny_model, *overrides, **files)


# --- schedule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "rows", "steps"),
    [
        (["max_steps=2"], 4, 2),  # two prompts a step: epochs have no end
        (["max_steps=0", "num_train_epochs=1"], 6, 3),
        (["max_steps=null", "num_train_epochs=2"], 3, 3),
        (["max_steps=2", "num_train_epochs=5"], 4, 2),
        (["max_steps=9", "num_train_epochs=1"], 5, 2),  # the fifth prompt doesn't fill a batch
    ],
)
def test_max_steps_and_num_train_epochs_end_the_run_with_what_comes_first(small, keys, rows, steps):
    assert small(*keys, rows=rows).steps == list(range(1, steps + 1))


@pytest.mark.parametrize(("period", "at"), [("0", []), ("null", []), ("2", [2, 3]), ("5", [3])])
def test_save_steps_and_eval_steps(small, period, at):
    keep = "checkpoint_config.max_to_keep=null"
    run = small("max_steps=3", f"save_steps={period}", f"eval_steps={period}", keep)
    assert run.checkpoints() == [f"checkpoint-{step}" for step in at]
    assert [row["step"] for row in run.rows if "val/accuracy" in row] == at
    assert run.steps == [1, 2, 3]


@pytest.mark.parametrize(("period", "at"), [("0", [3]), ("null", [3]), ("2", [2, 3]), ("1", [1, 2, 3])])
def test_logging_steps(small, period, at):
    run = small("max_steps=3", f"logging_steps={period}")
    assert run.steps == at
    assert all("actor/loss" in row for row in run.rows)


def test_val_before_train_adds_a_row_of_step_0(small):
    run = small("val_before_train=true")
    assert run.steps == [0, 1]
    assert "val/accuracy" in run.rows[0] and "actor/loss" not in run.rows[0]


def test_val_only_validates_without_an_optimizer_and_trains_nothing(small):
    run = small("val_only=true", "save_steps=1")
    assert run.steps == [0]
    assert "val/accuracy" in run.last
    assert run.strategies["actor_train"]._optimizers == ()
    assert not run.trained and not run.checkpoints()


def test_validation_shuffles_what_is_shown_and_changes_no_score(small):
    keys = ("val_only=true", "log_val_generations=4", "validation.generating_args.temperature=1.0")
    plain, mixed, again = (small(*keys, *more) for more in ([], *[["validation.shuffle=true"]] * 2))
    order = [[sample["prompt"] for sample in run.lines("samples.jsonl")] for run in (plain, mixed, again)]
    assert order[0] == ["0l=", "1U=", "2l=", "3U="]
    assert order[1] == order[2] != order[0]
    assert mixed.last["val/case/reward"] == plain.last["val/case/reward"]


def test_responses_vote_by_the_answers_that_their_reward_states(small):
    odd = "len(response) and ord(response[0]) % 2"
    reward = f"def case(response, task):\n    return {{'score': {odd}, 'pred': {odd}}}\n"
    keys = ("val_only=true", "validation.generating_args.temperature=1.0", "validation.bootstrap=50")
    run = small(*keys, "validation.generating_args.num_return_sequences=3", "validation.maj_at_k=[1,3]", reward=reward)
    values = run.last
    assert values["val/case/maj_at_1"] == pytest.approx(values["val/case/accuracy"])
    assert values["val/case/maj_at_3"] == int(values["val/case/maj_at_3"] * 16) / 16 != values["val/case/maj_at_1"]
    assert values["val/case/maj_at_3_spread"] > 0


def test_the_optimal_token_baseline_reads_the_trainers_gradients(small):
    run = small("adv_estimator=optimal_token_baseline", "num_return_sequences_in_group=4", "rollout_batch_size=1")
    (_, batch), = run.trained  # fmt: skip
    assert ("actor_train", False) in {a[:2] for a in run.passes}, "a forward pass of its own"
    acting = batch.action_mask.view(4, -1)  # prompts and responses have one length here
    weight = batch.logit_gradients.view(4, -1).double().cumsum(1)[acting].view(4, 2)
    returns = batch.token_rewards.view(4, -1).sum(1, keepdim=True).double()
    assert weight.min() > 0.5 and returns.std() > 0  # a random model is sure of nothing
    baseline = (returns * weight).sum(0) / weight.sum(0)
    found = batch.advantages.view(4, -1)[acting].view(4, 2)
    torch.testing.assert_close(found, (returns - baseline).float())


FIRE = "actor_infer.generating_args.fire_temperature"


def test_the_first_token_has_a_temperature_of_its_own_and_is_not_trained_on(small):
    keys = ("response_length=4", "num_return_sequences_in_group=4", "val_before_train=true")
    likeliest = "actor_infer.generating_args.fire_top_k=1"
    run = small(*keys, f"{FIRE}=30", likeliest, dump=True)
    firsts = {row.task_id: set() for row in run.rollouts()}
    for row in run.rollouts():
        assert row.action_mask == [False] * 4 + [True] * 3, "three of the prompt, one that was drawn hot"
        firsts[row.task_id].add(row.token_ids[3])
    assert all(len(found) == 1 for found in firsts.values()), "one of one likeliest token"
    assert len({row.token_ids[4] for row in run.rollouts()}) > 2
    # What is trained is what was sampled: nothing but rounding between the sampler's log-probs and the trainer's.
    assert run.last["mismatch/kl"] < 1e-6 and run.last["mismatch/ratio_max"] == pytest.approx(1.0, abs=1e-3)
    training = [r.params for r in run.requests if r.id.startswith("train/")]
    assert {(p.temperature, p.top_k, p.max_new_tokens) for p in training} == {(30.0, 1, 1), (1.0, -1, 3)}
    assert {r.params.temperature for r in run.requests if r.id.startswith("val/")} == {0.0}
    hot = small(*keys, f"{FIRE}=100", dump=True)
    assert len({row.token_ids[3] for row in hot.rollouts()}) > 4
    assert hot.last["mismatch/kl"] < 1e-6


def test_val_only_needs_no_training_data_and_no_steps(small):
    run = small("val_only=true", "max_steps=0", f"{DATA}.file_name=[]")
    assert run.steps == [0]
    assert run.last["val/responses"] == 16


def test_an_epoch_that_ends_early_still_validates_saves_and_logs_its_last_step(small):
    # Upper-case tasks score 1 and are filtered out: 4 of 8 prompts are left, 2 of 4 planned steps.
    reward = "def case(response, task):\n    return 0.5 if task.payload['ground_truth'] == 'lower' else 1.0\n"
    keys = ["max_steps=0", "num_train_epochs=1", "rewards.case.query_filter_config.type=mean_filter"]
    keys += ["eval_steps=4", "save_steps=4", "logging_steps=0"]
    run = small(*keys, rows=8, reward=reward)
    assert run.checkpoints() == ["checkpoint-2"]
    assert run.steps == [2]
    assert "actor/loss" in run.last and "val/accuracy" in run.last
    done = small(*keys, "eval_steps=1", "save_steps=1", "logging_steps=1", rows=8, reward=reward)
    assert done.steps == [1, 2]
    assert all("actor/loss" in row and "val/accuracy" in row for row in done.rows)


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tiny_model, tmp_path_factory) -> Run:
    """Three steps, all checkpoints kept, with Hugging Face folders."""
    return run_small(
        tmp_path_factory.mktemp("saved") / "run",
        tiny_model,
        "max_steps=3",
        "save_steps=1",
        "eval_steps=1",
        "checkpoint_config.max_to_keep=null",
        "checkpoint_config.save_hf_model=true",
        dump=True,
    )


def test_save_hf_model_writes_a_folder_that_transformers_loads_with_the_trained_weights(saved):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = saved.folder / "output" / "checkpoints" / "checkpoint-3" / "hf_model"
    loaded = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    trained = {name.removeprefix("lm."): value for name, value in saved.weights().items()}
    assert set(loaded) == set(trained)
    assert all(torch.equal(loaded[name], value) for name, value in trained.items())
    assert any(saved.moved().values())
    assert AutoTokenizer.from_pretrained(folder).decode([10]) != ""


def exported(run: Run, where: str = "output/hf_model") -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(run.folder / where).named_parameters())


def is_trained(run: Run, where: str = "output/hf_model") -> bool:
    """Whether the folder holds the weights that the run ended with, and these moved."""
    trained = {name.removeprefix("lm."): value for name, value in run.weights().items()}
    found = exported(run, where)
    same = set(found) == set(trained) and all(torch.equal(found[name], trained[name]) for name in found)
    return same and any(run.moved().values())


def test_the_trained_model_is_kept_by_default_and_the_summary_says_where(small, capfd):
    run = small("max_steps=2", reward="def case(response, task):\n    return float(response < 'f')\n")
    assert run.checkpoints() == []
    assert is_trained(run)
    folder = run.folder / "output" / "hf_model"
    assert json.loads((folder / "roll_export.json").read_text()) == {"exp_name": "toy", "seed": 3, "step": 2}
    assert f"trainedmodel{folder}" in "".join(capfd.readouterr().err.split())  # a narrow terminal folds paths


def test_export_dir_and_export_model(small, tmp_path):
    assert is_trained(small(f"export_dir={tmp_path}/there"), str(tmp_path / "there"))
    run = small("export_model=false")
    assert not (run.folder / "output" / "hf_model").exists()
    assert not (small("val_only=true").folder / "output" / "hf_model").exists()


def test_a_resumed_run_replaces_its_model_and_another_run_moves_it_aside(small):
    first = small("max_steps=1", "save_steps=1")
    one = exported(first)
    resumed = again(first.folder, "max_steps=2", "save_steps=1", "resume_from_checkpoint=true")
    assert is_trained(resumed)
    assert not (first.folder / "output" / "hf_model" / "earlier.1").exists()
    two = exported(resumed)
    fresh = again(first.folder, "max_steps=1")
    assert all(torch.equal(value, one[name]) for name, value in exported(fresh).items())
    aside = exported(fresh, "output/hf_model/earlier.1")
    assert all(torch.equal(value, two[name]) for name, value in aside.items())


FULL_DISK = OSError(28, "No space left on device")
NOT_EXPORTED = mock.patch.object(Fsdp2Strategy, "export", side_effect=FULL_DISK)
NOT_MERGED = mock.patch("roll.pipelines.run.unwritten_model.export_checkpoint", side_effect=FULL_DISK)
NOT_SAVED = mock.patch.object(Fsdp2Strategy, "save", side_effect=FULL_DISK)


def test_a_model_that_its_ranks_cannot_write_is_written_from_a_checkpoint(small, caplog):
    expected = exported(small("max_steps=2"))
    with NOT_EXPORTED:
        run = small("max_steps=2")
    assert run.checkpoints() == ["checkpoint-2"]
    assert exported(run).keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in exported(run).items())
    record = json.loads((run.folder / "output" / "hf_model" / "roll_export.json").read_text())
    assert record == {"exp_name": "toy", "seed": 3, "step": 2}
    assert "couldn't be written" in caplog.text
    # Which doesn't take the place of what an earlier run has left there.
    with NOT_EXPORTED:
        again(run.folder, "max_steps=2")
    assert (run.folder / "output" / "checkpoints" / "earlier.1" / "checkpoint-2").is_dir()
    assert (run.folder / "output" / "hf_model" / "earlier.1" / "config.json").is_file()


def test_a_model_that_cannot_be_written_at_all_is_kept_in_a_checkpoint_that_can_be_exported(small, tmp_path):
    from roll.checkpoint.files import CheckpointWriteError
    from roll.cli.__main__ import main

    whole = small("max_steps=1")
    message = r"hf_model .*No space left.*weights are in (\S+checkpoint-1): roll export \S+ -o DIR"
    with NOT_EXPORTED, NOT_MERGED, pytest.raises(CheckpointWriteError, match=message) as caught:
        small("max_steps=1")
    folder = re.search(message, str(caught.value))[1]
    assert main(["export", folder, "-o", str(tmp_path / "there")]) == 0
    kept = exported(whole, str(tmp_path / "there"))
    assert all(torch.equal(value, kept[name]) for name, value in exported(whole).items())
    with NOT_EXPORTED, NOT_SAVED, pytest.raises(CheckpointWriteError, match="No space.*no checkpoint was kept"):
        small("max_steps=1")


def test_a_model_that_cannot_be_written_takes_nothing_with_it(small):
    from roll.checkpoint.files import CheckpointWriteError

    first = small("max_steps=1", "save_steps=1")
    before = exported(first)
    message = r"hf_model .*No space left.*weights are in \S+checkpoint-2: roll export"
    with NOT_EXPORTED, NOT_MERGED, pytest.raises(CheckpointWriteError, match=message):
        again(first.folder, "max_steps=2", "save_steps=1", "resume_from_checkpoint=true")
    assert all(torch.equal(value, before[name]) for name, value in exported(first).items())
    assert not list((first.folder / "output" / "hf_model").glob(".*"))
    # Nothing is left to train; the model is written all the same.
    last = again(first.folder, "max_steps=2", "save_steps=1", "resume_from_checkpoint=true")
    assert any(not torch.equal(value, before[name]) for name, value in exported(last).items())


def test_checkpoint_folder_and_retention(small):
    run = small("max_steps=3", "save_steps=1", "checkpoint_config.max_to_keep=1")
    assert run.checkpoints() == ["checkpoint-3"]
    assert not (run.folder / "output" / "checkpoints" / "checkpoint-3" / "hf_model").exists()
    moved = small("save_steps=1", "checkpoint_config.output_dir=${output_dir}/../elsewhere")
    assert moved.checkpoints("elsewhere") == ["checkpoint-1"]
    assert moved.checkpoints() == []


@pytest.mark.parametrize("how", ["true", "auto", "checkpoint-1"])
def test_resume_from_checkpoint(small, saved, how):
    first = small("max_steps=2", "save_steps=1")
    value = how if how in ("true", "auto") else first.folder / "output" / "checkpoints" / how
    resumed = again(first.folder, "max_steps=3", "save_steps=1", f"resume_from_checkpoint={value}")
    assert resumed.steps == [1, 2, 3]
    assert len(resumed.trained) == (2 if how == "checkpoint-1" else 1)
    whole = saved.weights()
    assert all(torch.equal(value, whole[name]) for name, value in resumed.weights().items())


def test_resuming_from_nothing(small):
    assert small("resume_from_checkpoint=auto").steps == [1]
    with pytest.raises(ConfigError, match="resume_from_checkpoint"):
        small("resume_from_checkpoint=true")
    fresh = small("save_steps=1")
    assert len(again(fresh.folder, "resume_from_checkpoint=false").trained) == 1
    with pytest.raises(ValueError, match="written with seed 3, but seed is 4"):
        again(fresh.folder, "resume_from_checkpoint=true", "seed=4")


def test_val_only_of_a_checkpoint_validates_its_weights_and_keeps_what_is_on_record(saved):
    accuracy = {row["step"]: row["val/case/reward"] for row in saved.rows}
    folder = saved.folder / "output" / "checkpoints" / "checkpoint-2"
    run = again(saved.folder, "val_only=true", f"resume_from_checkpoint={folder}")
    assert run.steps == [2]
    assert run.last["val/case/reward"] == accuracy[2]
    kept = run.folder / "output" / "logs" / "metrics.1.jsonl"
    assert [json.loads(line)["step"] for line in kept.read_text().splitlines()] == [1, 2, 3]


# --- what is written --------------------------------------------------------------------------------------------------


def test_the_rollout_dump_holds_exactly_what_was_trained(saved):
    for step, (role, batch) in enumerate(saved.trained, start=1):
        assert role == "actor_train"
        dumped = {f"{row.task_id}#{row.member}": row for row in saved.rollouts(step)}
        assert set(dumped) == set(batch.row_ids)
        for i, name in enumerate(batch.row_ids):
            row = dumped[name]
            assert row.step == step and row.domain == row.tag == "case"
            assert row.token_ids == batch.row("token_ids", i).tolist()
            assert row.action_mask == batch.row("action_mask", i).tolist()
            assert row.advantages == batch.row("advantages", i).tolist()
            assert row.sampling_logprobs == batch.row("sampling_logprobs", i).tolist()
            assert row.reward == float(batch.row("token_rewards", i).sum())
            assert row.prompt.endswith("=") and row.response


def test_without_rollout_dump_dir_nothing_is_dumped(small):
    assert not list(small().folder.rglob("*.parquet"))


@pytest.mark.parametrize("count", [0, 3])
def test_log_val_generations(small, count):
    run = small("eval_steps=1", f"log_val_generations={count}")
    samples = run.lines("samples.jsonl")
    assert len(samples) == count
    assert all(sample["prompt"].endswith("=") and sample["response"] for sample in samples)


def test_track_with_and_logging_dir_and_tracker_kwargs(small, tmp_path, capsys):
    logs = tmp_path / "logs"
    with pytest.raises(FileNotFoundError):  # nobody wrote metrics.jsonl
        small("track_with=[tensorboard,stdout]", f"logging_dir={logs}", "tracker_kwargs.stdout.live=false")
    assert list((logs / "tensorboard").glob("events*"))
    printed = capsys.readouterr()
    lines = [line for line in (printed.out + printed.err).splitlines() if "step" in line and "reward" in line]
    assert len(lines) >= 1
    with pytest.raises(FileNotFoundError):
        small("track_with=[]", f"logging_dir={tmp_path / 'none'}")
    assert not list((tmp_path / "none").glob("metrics*"))


def test_exp_name_and_output_dir_name_the_run(small, tmp_path, capsys):
    run = small("exp_name=heron", "save_steps=1", f"output_dir={tmp_path}/there")
    assert "heron: 1 steps" in capsys.readouterr().err
    manifest = (tmp_path / "there" / "checkpoints" / "checkpoint-1").glob("*.json")
    assert any("heron" in file.read_text() for file in manifest)
    assert not (run.folder / "output").exists()


# --- data -------------------------------------------------------------------------------------------------------------

LONG = [row_of(i, prompt="a long one=" if i == 3 else "abc") for i in range(8)]


def prompts(run):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run.engines[0]._model.config._name_or_path)
    return [tokenizer.decode(ids) for ids in run.prompts()]


@pytest.mark.parametrize(("how", "text"), [("left", "one="), ("right", "a lo"), ("middle", "a e=")])
def test_truncation_cuts_prompts_to_prompt_length(small, how, text):
    run = small(
        "rollout_batch_size=8",
        "num_return_sequences_in_group=2",
        "prompt_length=4",
        f"truncation={how}",
        "actor_train.training_args.per_device_train_batch_size=16",
        data=LONG,
    )
    assert Counter(prompts(run)) == {"abc": 14, text: 2}
    assert run.rows[0]["data/prompts_truncated"] == 1


@pytest.mark.parametrize("keys", [["truncation=filter"], [f"{DATA}.filter_overlong_prompts=true"]])
def test_long_prompts_are_left_out_and_counted(small, keys):
    run = small("prompt_length=4", "max_steps=4", *keys, data=LONG)
    assert set(prompts(run)) == {"abc"}
    assert run.rows[0]["data/prompts_filtered"] == 1


def test_a_long_prompt_is_an_error_by_default_and_names_itself(small):
    with pytest.raises(DataError, match=r"1 of 8 prompts .* prompt_length = 4 .*:3' with 11"):
        small("prompt_length=4", data=LONG)


def test_preprocessing_num_workers_tokenise_in_threads_to_the_same_end(small):
    with mock.patch("roll.data.threads.ThreadPoolExecutor", wraps=ThreadPoolExecutor) as threads:
        one = small("max_steps=2")
        assert not threads.called
        three = small("max_steps=2", f"{DATA}.preprocessing_num_workers=3")
        assert threads.call_args.args == (3,)
    assert one.prompts() == three.prompts()


def test_sequence_length_is_what_the_model_and_the_token_budgets_must_hold(small):
    dynamic = ("actor_train.use_dynamic_batching_in_train=true", "actor_train.max_tokens_per_microbatch_in_train=20")
    assert small(*dynamic).steps == [1]
    for keys in (["sequence_length=17"], ["sequence_length=257"], ["sequence_length=21", *dynamic]):
        with pytest.raises(ConfigError, match="sequence"):
            small(*keys)


TWO = [row_of(i, tag="case" if i % 2 else "other") for i in range(12)]
OTHER = ("rewards.other.name=custom", "rewards.other.tag_included=other")


@pytest.mark.parametrize(
    ("keys", "counts"),
    [
        ([], {"case": 4, "other": 4}),
        ([f"{DATA}.domain_interleave_probs={{case: 0.75, other: 0.25}}"], {"case": 6, "other": 2}),
    ],
)
def test_domain_interleave_probs_are_met_exactly_in_every_batch(small, keys, counts):
    wider = ("rollout_batch_size=4", "max_steps=2", "actor_train.training_args.per_device_train_batch_size=8")
    run = small(*OTHER, *wider, *keys, data=TWO, dump=True)
    for step in (1, 2):
        assert Counter(row.domain for row in run.rollouts(step)) == counts
    assert run.last["data/other/share"] == counts["other"] / 8


def test_a_domain_without_a_share_is_for_validation_alone(small, tmp_path):
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps(row_of(i, tag="other")) + "\n" for i in range(100, 104)))
    keys = (*OTHER, f"+validation.data_args={{file_name: {held_out}}}", "eval_steps=1", "max_steps=1")
    mine = [row for row in TWO if row["tag"] == "case"]
    share = f"{DATA}.domain_interleave_probs={{case: 1.0}}"
    run = small(*keys, share, data=mine, dump=True)
    assert {row.domain for row in run.rollouts(1)} == {"case"}
    assert "val/other/accuracy" in run.last
    with pytest.raises(DataError, match=r"'other' of rewards has no training rows.*leave it out.*\{case: 1\}"):
        small(*keys, data=mine)
    with pytest.raises(DataError, match="training rows of domain 'other', which domain_interleave_probs leaves out"):
        small(*keys, share, data=TWO)


def test_a_domains_weight_and_tags_reach_the_advantages(small):
    keys = ("rewards.other.weight=3", "adv_estimator=reinforce", "rollout_batch_size=2")
    run = small(*OTHER, *keys, data=TWO, dump=True, reward=CONSTANT.format(0.5))
    advantages = {row.domain: row.advantages[-1] for row in run.rollouts()}
    assert advantages == {"case": 0.5, "other": 1.5}


def test_templates_by_tag_over_the_global_one_over_that_of_the_data(small):
    shown = {}
    for name, keys in {
        "data": (f"{DATA}.template='<{{prompt}}>'",),
        "global": (f"{DATA}.template='<{{prompt}}>'", "global_template='[{prompt}]'"),
        "tag": ("global_template='[{prompt}]'", "tag_to_template.other='({prompt})'"),
    }.items():
        run = small(*OTHER, *keys, data=[row_of(i, tag=("case", "other")[i], prompt="p") for i in range(2)])
        shown[name] = set(prompts(run))
    assert shown == {"data": {"<p>"}, "global": {"[p]"}, "tag": {"[p]", "(p)"}}


def test_shuffle_off_keeps_the_order_of_the_file(small):
    ordered = small(f"{DATA}.shuffle=false", "max_steps=3", data=[row_of(i) for i in range(6)])
    assert [text[0] for text in prompts(ordered)] == list("001122334455")
    shuffled = small("max_steps=3", data=[row_of(i) for i in range(6)])
    assert sorted(prompts(shuffled)) == sorted(prompts(ordered)) != prompts(shuffled)


# --- filters, over-sampling, failures ---------------------------------------------------------------------------------


def test_query_filters_replace_groups_by_other_prompts(small):
    reward = "def case(response, task):\n    return float(task.payload['ground_truth'] == 'lower') - 0.5\n"
    args = "rewards.case.query_filter_config={type: mean_filter, filter_args: {threshold_down: 0, threshold_up: 1}}"
    run = small(args, "max_steps=2", reward=reward, dump=True)
    assert {row.reward for step in (1, 2) for row in run.rollouts(step)} == {0.5}
    dropped = run.lines("dropped.jsonl")
    assert sum(run.column("rollout/filtered_groups")) == sum(run.column("dropped/filtered_group")) >= 1
    assert {(line["reason"], tuple(line["sample"]["scores"])) for line in dropped} == {("filtered_group", (-0.5, -0.5))}


def test_responses_that_no_function_scores_leave_their_group_and_are_counted(small):
    count = "import itertools\nnumbers = itertools.count()\n"
    reward = f"{count}def case(completions, **kwargs):\n    return [next(numbers) % 4 or None for _ in completions]\n"
    keys = ("num_return_sequences_in_group=8", "rollout_batch_size=1", "adv_estimator=dr_grpo")
    run = small(*keys, reward=reward, dump=True)
    rows = run.rollouts()
    assert sorted(row.reward for row in rows) == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]  # two of eight are None
    assert {round(row.advantages[-1], 6) for row in rows} == {-1.0, 0.0, 1.0}, "compared with the six that are left"
    assert run.last["rollout/unscored_responses"] == run.last["dropped/unscored_response"] == 2
    assert "rollout/failed_episodes" not in run.last
    assert run.lines("dropped.jsonl")[0]["detail"].startswith("no reward function scores this row")


def test_a_run_whose_rows_no_function_scores_ends_with_that_reason(small):
    reward = "def case(completions, **kwargs):\n    return [None for _ in completions]\n"
    with pytest.raises(FilterBudgetExhausted, match="unscored: fewer than 2 usable responses; no reward"):
        small(reward=reward)


def test_response_filters_leave_out_single_responses_before_their_group_is_compared(small):
    count = "import itertools\nnumbers = itertools.count()\n"
    reward = f"{count}def case(response, task):\n    return float(next(numbers) % 4)\n"
    rule = "{type: score_filter, filter_args: {threshold_down: 0.5}}"
    keys = ("num_return_sequences_in_group=8", "rollout_batch_size=1", "adv_estimator=dr_grpo")
    run = small(f"rewards.case.response_filter_config={rule}", *keys, reward=reward, dump=True)
    rows = run.rollouts()
    assert sorted(row.reward for row in rows) == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]  # two of eight scored 0
    assert {round(row.advantages[-1], 6) for row in rows} == {-1.0, 0.0, 1.0}, "compared with the six that are left"
    assert run.last["rollout/filtered_responses"] == run.last["dropped/filtered_response"] == 2
    assert "rollout/failed_episodes" not in run.last
    (first, _) = run.lines("dropped.jsonl")
    assert (first["reason"], first["sample"]["score"]) == ("filtered_response", 0.0)
    assert first["detail"] == "filtered: score 0 outside (0.5, inf)"
    assert run.last["group/size_mean"] == 6


def test_a_group_without_enough_responses_left_is_replaced_and_validation_is_not_filtered(small):
    reward = "def case(response, task):\n    return float(task.payload['ground_truth'] == 'lower')\n"
    rule = "rewards.case.response_filter_config={type: score_filter, filter_args: {threshold_up: 0.5}}"
    run = small(rule, "val_before_train=true", reward=reward, dump=True)
    assert {row.reward for row in run.rollouts()} == {0.0}
    assert run.last["rollout/filtered_groups"] >= 1
    assert "left by response_filter_config" in run.lines("dropped.jsonl")[0]["detail"]
    assert run.rows[0]["val/case/reward"] == 0.5
    longest = "rewards.case.response_filter_config={type: length_filter, filter_args: {threshold_up: 2}}"
    with pytest.raises(FilterBudgetExhausted, match="loosen query_filter_config or response_filter_config"):
        small(longest, "max_num_gen_batches=1")  # every response has 2 tokens


def test_max_num_gen_batches_is_the_budget_of_filters(small):
    keys = ("rewards.case.query_filter_config.type=std_filter", "max_num_gen_batches=2")
    with pytest.raises(FilterBudgetExhausted, match=r"started 4 prompts .* kept 0 of the 2 .* all 4 at 0\.5"):
        small(*keys, reward=CONSTANT.format(0.5))
    run = small("max_num_gen_batches=1", reward=CONSTANT.format(0.5))
    assert run.last["group/zero_signal_share"] == 1.0


def test_additional_prompts_are_started_and_given_back(small):
    run = small("is_use_additional_prompts=true", "max_additional_running_prompts=3", "max_steps=2")
    assert len(run.submitted[0]) == (2 + 3) * 2
    assert run.column("rollout/returned_prompts") == [3, 3]
    assert run.last["rollout/groups"] == 2
    # What was given back comes first in the next step.
    first, second = ([r.id.split("/", 2)[2] for r in batch] for batch in run.submitted)
    assert [name.split("#")[0] for name in first[4:]] == [name.split("#")[0] for name in second[:6]]
    plain = small()
    assert len(plain.submitted[0]) == 4


RAISING = """
from pathlib import Path

def case(response, task):
    with Path({log!r}).open("a") as log:
        log.write(task.id + "\\n")
    if {when}:
        raise RuntimeError("the judge is out")
    return 0.25
"""


def test_a_reward_that_raises_drops_its_groups_counts_them_and_never_scores_0(small, tmp_path):
    log = tmp_path / "calls"
    reward = RAISING.format(log=str(log), when="task.payload['ground_truth'] == 'upper'")
    run = small("max_steps=2", "reward_retries=1", reward=reward, dump=True, rows=8)
    rollouts = [row for step in (1, 2) for row in run.rollouts(step)]
    assert {(row.status, row.reward) for row in rollouts} == {("truncated", 0.25)}
    failed = sum(run.column("rollout/failed_groups"))
    assert failed == sum(run.column("dropped/failed_group")) >= 1
    assert sum(run.column("rollout/failed_reward_error")) == 2 * failed
    lines = run.lines("dropped.jsonl")
    assert all("the judge is out" in line["detail"] and "2 attempts" in line["detail"] for line in lines)
    assert run.column("reward/min") == [0.25, 0.25]
    calls = Counter(Counter(log.read_text().split()).values())
    # Two responses per group: one call each, or two with the retry.
    assert calls == {2: 4, 4: failed}


def test_a_group_goes_on_with_its_survivors(small):
    reward = RAISING.format(log="/dev/null", when="ord(response[0]) % 3 == 0")
    keys = ("num_return_sequences_in_group=8", "actor_train.training_args.per_device_train_batch_size=16")
    run = small(*keys, "reward_retries=0", reward=reward, dump=True)
    failed = int(run.last["rollout/failed_reward_error"])
    assert 0 < failed < 15
    assert len(run.rollouts()) == 16 - failed == run.last["rollout/responses"]
    assert run.last["dropped/failed_response"] == failed
    assert {row.reward for row in run.rollouts()} == {0.25}
    assert run.lines("dropped.jsonl")[0]["detail"].endswith("the judge is out")


def test_timeout_s_ends_a_slow_reward(small):
    reward = (
        "import time\n\ndef case(response, task):\n    time.sleep(5 * (task.payload['ground_truth'] == 'upper'))\n"
        "    return 1.0\n"
    )
    # The order of the file: prompt 0 is fine, prompt 1 hangs, prompt 2 takes its place.
    keys = ("rewards.case.timeout_s=0.3", f"{DATA}.shuffle=false", "rewards.case.world_size=2")
    run = small(*keys, reward=reward, dump=True)
    assert run.last["rollout/failed_groups"] == 1
    assert {row.task_id[-2:] for row in run.rollouts()} == {":0", ":2"}


def test_rpc_timeout_bounds_the_wait_for_a_reward(small):
    reward = "import time\n\ndef case(response, task):\n    time.sleep(3)\n    return 1.0\n"
    with pytest.raises(RolloutStalled, match=r"4 episodes: .*\(reward\)"):
        small("rpc_timeout=0.3", reward=reward)


@pytest.mark.parametrize("processes", [1, 2])
def test_world_size_of_a_reward_is_its_number_of_processes(small, tmp_path, processes):
    log = tmp_path / "pids"
    reward = (
        "import os, time\nfrom pathlib import Path\n\ndef case(response, task):\n    time.sleep(0.05)\n"
        f"    with Path({str(log)!r}).open('a') as log:\n        log.write(f'{{os.getpid()}}\\n')\n    return 1.0\n"
    )
    small(f"rewards.case.world_size={processes}", reward=reward)
    assert len(set(log.read_text().split())) == processes


def test_reward_kwargs_of_the_domain_win_over_those_of_the_function(small):
    reward = "def case(response, task, *, low=0.0, high=0.0):\n    return low + high\n"
    keys = ("custom_reward_function.reward_kwargs={low: 1.0, high: 10.0}", "rewards.case.reward_kwargs={low: 2.0}")
    assert small(*keys, reward=reward).last["reward/mean"] == 12.0
