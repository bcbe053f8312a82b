"""`roll check` refuses what a run's tokenizer and rows would end it for, and says what it didn't look at."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from data_tokenizers import CHAT_TEMPLATE, word_tokenizer

from roll.cli.__main__ import main
from roll.configs.checks.model_file_checks import model_file_checks
from roll.configs.checks.prerequisites import prerequisite_violations
from roll.configs.parsing.loader import read_tree
from roll.data.data_check import Progress
from roll.pipelines.check_process import StartCheck, look
from roll.pipelines.run.model_options import has_model_options, option_problems

GOOD = [{"prompt": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(1, 9)]
TALK = [{"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": "2"}]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    word_tokenizer(chat_template=CHAT_TEMPLATE).save_pretrained(tmp_path / "model")
    Path("model/config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 50000}))
    Path("model/model.safetensors").touch()
    return tmp_path


def write(name, rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def config_of(**changes):
    tree = {
        "pipeline": "rlvr", "executor": "inline", "max_steps": 2, "pretrain": "model", "rollout_batch_size": 2,
        "num_return_sequences_in_group": 2, "prompt_length": 32, "response_length": 16, "output_dir": "out",
        "rewards": {"sums": {"name": "math_rule"}},
        "actor_train": {
            "training_args": {"per_device_train_batch_size": 4},
            "data_args": {"file_name": "train.jsonl", **changes.pop("data", {})},
        },
        **changes,
    }  # fmt: skip
    reading = read_tree(tree)
    assert reading.config is not None and not reading.violations, "\n".join(map(str, reading.violations))
    return reading.config


def offline(pipeline, **changes):
    keys = {"sequence_length": 64, **({"reference": {}} if pipeline == "dpo" else {})}
    config = {"pipeline": pipeline, "executor": "inline", "max_steps": 1, "pretrain": "model", "output_dir": "out"}
    args = {"per_device_train_batch_size": 2}
    train = {"training_args": args, "data_args": {"file_name": "train.jsonl", **changes.pop("data", {})}}
    reading = read_tree({**config, **keys, "actor_train": train, **changes})
    assert reading.config is not None and not reading.violations, "\n".join(map(str, reading.violations))
    return reading.config


def refused(config):
    """(key, sentence) of all that would end the run."""
    return [(key, sentence) for key, sentence, _ in look(config).violations]


BAD_ROWS = {
    "no prompt": [GOOD[0], {"answer": "2"}, {"answer": "3"}],
    "no answer": [GOOD[0], {"prompt": "a"}, {"prompt": "b"}],
    "null": [GOOD[0], {"prompt": None, "answer": "2"}, {"prompt": "  ", "answer": "2"}],
}


@pytest.mark.parametrize("rows", BAD_ROWS.values(), ids=BAD_ROWS)
def test_bad_rows_are_named_with_file_line_and_key(rows):
    write("train.jsonl", rows)
    ((key, sentence),) = refused(config_of())
    assert key == "actor_train.data_args.file_name"
    assert "2 bad rows" in sentence and "train.jsonl:2: " in sentence and "train.jsonl:3: " in sentence
    assert look(config_of(data={"max_bad_rows": 2})).violations == []
    assert "2 bad rows" in look(config_of(data={"max_bad_rows": 2})).warnings[0]
    assert len(refused(config_of(data={"max_bad_rows": 1}))) == 1


def test_rows_without_any_answer_are_refused_where_the_reward_needs_one():
    write("train.jsonl", [{"prompt": row["prompt"]} for row in GOOD])
    ((key, sentence),) = refused(config_of())
    assert key == "rewards.sums.name" and "all 8 rows that the reward of 'sums' can't score" in sentence
    assert refused(config_of(rewards={"sums": {"name": "repetition"}})) == []


def test_prompts_beyond_the_limit_stop_a_run_or_are_lost_as_truncation_says():
    long = {"prompt": "word " * 40, "answer": "1"}  # 40 words and the template's: more than 32
    write("train.jsonl", [*GOOD, long])
    ((key, sentence),) = refused(config_of())
    assert key == "prompt_length" and "1 rows of more than prompt_length = 32 tokens stop the run" in sentence
    answer = look(config_of(truncation="filter"))
    assert answer.violations == [] and "1 rows of more than prompt_length" in answer.warnings[0]
    write("train.jsonl", [long, {**long, "prompt": "word " * 50}])
    ((key, sentence),) = refused(config_of(truncation="filter"))
    assert key == "prompt_length" and "all 2 rows" in sentence and "stop the run" in sentence
    assert refused(config_of(truncation="left")) == []


def test_tags_domains_epochs_and_ids_are_looked_at_before_the_run_does():
    write("train.jsonl", [{**row, "tag": "other"} for row in GOOD])
    two = {"a": {"name": "math_rule"}, "b": {"name": "math_rule"}}
    assert [key for key, _ in refused(config_of(rewards=two))] == [
        "actor_train.data_args.tag", "rewards.a.tag_included", "rewards.b.tag_included",
    ]  # fmt: skip
    write("train.jsonl", [{**row, "id": "same"} for row in GOOD])
    assert refused(config_of())[0][0] == "actor_train.data_args.id"
    write("train.jsonl", GOOD[:3])  # 3 prompts in one epoch, and 4 a step
    ((key, sentence),) = refused(config_of(max_steps=None, num_train_epochs=1, rollout_batch_size=4, actor_train={
        "training_args": {"per_device_train_batch_size": 8}, "data_args": {"file_name": "train.jsonl"},
    }))  # fmt: skip
    assert key == "actor_train.data_args" and "give 3 prompts, fewer than one step" in sentence


def test_validation_rows_are_read_too_if_the_run_validates():
    write("train.jsonl", GOOD)
    write("val.jsonl", [{"prompt": "", "answer": "1"}])
    held_out = {"data_args": {"file_name": "val.jsonl"}}
    assert refused(config_of(validation=held_out, eval_steps=1))[0][0] == "validation.data_args.file_name"
    assert not Path("out").exists()  # a check leaves nothing behind


PAIR = {"prompt": "What is 1 + 1?", "chosen": "w2", "rejected": "w3"}


@pytest.mark.parametrize(
    ("pipeline", "good", "bad", "says"),
    [
        ("sft", {"messages": TALK}, {"messages": [TALK[0], {"role": "assistant", "content": ""}]}, "is empty"),
        ("dpo", PAIR, {**PAIR, "rejected": "w2"}, "are the same"),
        ("reward_model", PAIR, {**PAIR, "chosen": ""}, "chosen"),
    ],
)
def test_finished_rows_of_every_pipeline_are_read(pipeline, good, bad, says):
    data = {"messages": "messages"} if pipeline == "sft" else {}
    write("train.jsonl", [good, good, bad])
    ((key, sentence),) = refused(offline(pipeline, data=data))
    assert key == "actor_train.data_args.file_name" and "train.jsonl:3: " in sentence and says in sentence
    write("train.jsonl", [good, {**good, "prompt": "What?"}])
    assert refused(offline(pipeline, data=data)) == []


def test_a_share_that_leaves_nothing_to_train_on_is_refused():
    write("train.jsonl", [{"messages": TALK}] * 3)
    ((_, sentence),) = refused(offline("sft", data={"messages": "messages"}, validation_share=0.99))
    assert "validation_share 0.99 of 3 rows leaves nothing to train on" in sentence


def test_a_check_that_runs_out_of_time_says_what_it_did_not_read(monkeypatch):
    write("train.jsonl", GOOD * 200)  # 1,600 rows in chunks of 256
    monkeypatch.setattr("roll.pipelines.check_process._READING_S", 0.0)
    (unread,) = look(config_of()).unread
    assert unread.startswith("training data: rows after the first 256;")
    assert Progress(None).at(5, "rows") is False


def test_templates_and_tokenizers_that_are_not_there_are_refused_in_no_time():
    write("train.jsonl", GOOD)
    word_tokenizer(chat_template=None).save_pretrained("bare")
    shutil.copy("model/config.json", "bare")
    Path("empty").mkdir()
    shutil.copy("model/config.json", "empty")
    keys = {violation.path: str(violation) for violation in prerequisite_violations(config_of(pretrain="bare"))}
    assert "the tokenizer in bare has none" in keys["actor_train.data_args.template"]
    assert prerequisite_violations(config_of(pretrain="bare", data={"template": "plain"})) == []
    tokenizer, weights = model_file_checks(config_of(pretrain="empty"))
    assert tokenizer.path == weights.path == "pretrain"
    assert "its tokenizer" in str(tokenizer) and "with weights" in str(weights)
    Path("empty/model.safetensors").touch()
    Path("empty/tokenizer.json").touch()
    assert list(model_file_checks(config_of(pretrain="empty"))) == []


def test_rows_that_are_not_here_are_named():
    write("train.jsonl", GOOD)
    check = StartCheck()
    own = config_of(data={"dataset": "rows.py:Rows", "file_name": []})
    assert list(check.violations(own)) == []
    assert "actor_train.data_args: rows of rows.py:Rows" in check.unread[0]


def test_tasks_that_a_generator_cannot_make_are_refused(capsys):
    pytest.importorskip("reasoning_gym")
    task = {"tag": "sums", "dataset": "products", "size": 1000, "config": {"min_digits": 1, "max_digits": 1}}
    task["config"] |= {"min_terms": 2, "max_terms": 2}  # 100 products of two digits
    config = config_of(rewards={"sums": {"name": "reasoning_gym"}}, data={"file_name": [], "procedural": [task]})
    (violation,) = StartCheck().violations(config)
    assert violation.path == "actor_train.data_args.procedural[0]" and "1000 are needed" in str(violation)


def test_the_command_prints_what_it_refuses_with_the_line_of_the_file(capsys):
    write("train.jsonl", BAD_ROWS["null"])
    Path("job.yaml").write_text(
        "pipeline: rlvr\nexecutor: inline\nmax_steps: 1\npretrain: model\nrollout_batch_size: 2\n"
        "num_return_sequences_in_group: 2\nprompt_length: 32\nresponse_length: 8\nrewards: {sums: {name: math_rule}}\n"
        "actor_train:\n  training_args: {per_device_train_batch_size: 4}\n  data_args: {file_name: train.jsonl}\n"
    )
    assert main(["check", "job"]) == 2
    printed = capsys.readouterr().err
    assert "train.jsonl:2: the prompt is None" in printed and "at: job.yaml:12" in printed
    assert "fix: mend or drop these rows" in printed


def test_a_share_of_the_prompts_is_held_out_and_the_same_whatever_the_order(tmp_path):
    from roll.data.prompts import PromptSet
    from roll.types.trajectory import Task

    def tasks(order):
        return [Task(id=f"a:{i}", source="a", payload={}, seed=i, tag="a", domain="a") for i in order]

    def split(order, seed=1):
        prompts = PromptSet(tasks(order), [(i,) for i in order], {})
        prompts.hold_out(0.25, seed)
        assert prompts.metrics == {"data/rows_held_out": 2.0}  # round(0.25 x 8)
        assert all(prompts.held_out.prompt_ids(task) == (task.seed,) for task in prompts.held_out.tasks)
        return {task.id for task in prompts.tasks}, {task.id for task in prompts.held_out.tasks}

    train, held = split(range(8))
    assert len(train) == 6 and len(held) == 2 and not train & held
    assert split(list(reversed(range(8)))) == (train, held)
    assert split(range(8), seed=2)[1] != held


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"validation": {"data_args": {"file_name": "val.jsonl"}}}, "expected 0 beside validation.data_args"),
        ({"data": {"streaming": True}}, "rows that are streamed can't be split"),
        ({"data": {"file_name": []}, "val_only": True}, "there are no training prompts"),
    ],
)
def test_a_share_that_cannot_be_held_out_is_refused(changes, says):
    with pytest.raises(AssertionError) as caught:
        config_of(validation_share=0.1, **changes)
    assert says in str(caught.value)


def test_a_share_is_sampled_as_validation_says():
    config = config_of(validation_share=0.1, eval_steps=1)
    assert config.validates and config.validation.generating_args.temperature == 0.0
    assert config_of(validation_share=0.1, validation={"pass_threshold": 0.5}).validation.pass_threshold == 0.5
    assert config_of().validation is None
    write("train.jsonl", GOOD[:2])
    ((_, sentence),) = refused(config_of(validation_share=0.9))
    assert "validation_share 0.9 of 2 rows leaves nothing to train on" in sentence


def test_options_that_the_model_does_not_have_are_refused(tiny_model):
    def problems(**options):
        data = {"file_name": "train.jsonl"}
        args = {"per_device_train_batch_size": 4}
        train = {"training_args": args, "data_args": data, "model_args": options}
        config = config_of(pretrain=str(tiny_model), actor_train=train)
        assert has_model_options(config)
        return [(key.removeprefix("actor_train.model_args."), said) for key, said, _ in option_problems(config)]

    ((key, sentence),) = problems(model_config_kwargs={"a": 1})
    assert key == "model_config_kwargs.a" and "has no such option" in sentence
    ((key, sentence),) = problems(model_config_kwargs={"hidden_size": 1024})
    assert key == "model_config_kwargs" and "has the shape" in sentence
    ((key, sentence),) = problems(freeze_module_prefix=["x"])
    assert key == "freeze_module_prefix" and "no parameter begins with 'x'" in sentence
    assert "leaves nothing to train" in problems(freeze_module_prefix=[""])[0][1]
    assert problems(freeze_module_prefix=["model.embed_tokens"]) == []
    assert problems(model_config_kwargs={"rms_norm_eps": 1e-5}) == []


def test_a_warm_start_is_read_by_the_same_process_and_its_keys_are_named(monkeypatch):
    write("train.jsonl", [{"messages": TALK}, {"messages": [TALK[0], {"role": "assistant", "content": ""}]}])
    Path("first.yaml").write_text(
        "pipeline: sft\nexecutor: inline\nmax_steps: 1\npretrain: model\nsequence_length: 64\n"
        "actor_train:\n  training_args: {per_device_train_batch_size: 2}\n"
        "  data_args: {file_name: train.jsonl, messages: messages}\n"
    )
    processes = []

    def answers(configs):
        processes.append([config.pipeline for config in configs])
        return [look(config) for config in configs]

    monkeypatch.setattr("roll.pipelines.check_process._answers_of_process", answers)
    envs = {"lake": {"env_type": "frozen_lake"}}
    manager = {"num_env_groups": 1, "group_size": 2}
    reading = read_tree({
        "pipeline": "agentic", "executor": "inline", "max_steps": 1, "output_dir": "out", "warm_start": "first.yaml",
        "custom_envs": envs, "train_env_manager": manager, "rollout_batch_size": 2,
        "prompt_length": 32, "response_length": 16,
        "actor_train": {
            "training_args": {"per_device_train_batch_size": 2}, "model_args": {"tokenizer_name_or_path": "model"},
        },
    })  # fmt: skip
    config = reading.config
    assert config is not None and not reading.violations, "\n".join(map(str, reading.violations))
    *_, violation = StartCheck().violations(config)
    assert violation.path == "warm_start (first.yaml): actor_train.data_args.file_name"
    assert "train.jsonl:2: " in str(violation)
    assert processes == [["agentic", "sft"]]
