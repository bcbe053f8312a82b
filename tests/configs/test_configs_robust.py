"""What once ended the check with a traceback, took it too long, or went through: each is a clear error now."""

from __future__ import annotations

import json
import time

import pytest
import yaml

from roll.configs.checks import model_file_checks, prerequisites
from roll.configs.checks.machine_checks import Machine
from roll.configs.errors import ConfigError
from roll.configs.full_check import load_checked
from roll.configs.parsing.find import find_config
from roll.configs.parsing.loader import load_config

LAUGHS = "pipeline: rlvr\na0: &a0 [x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)
YAMLS = {
    "an alias inside its anchor": ("pipeline: rlvr\nseed: &a [*a]\n", "stands inside what it refers to"),
    "many brackets": ("pipeline: rlvr\nseed: " + "[" * 10_000 + "]" * 10_000, "levels of sections"),
    "brackets that stay open": ("pipeline: rlvr\nseed: " + "[" * 10_000, "levels of sections"),
    "a billion laughs": (LAUGHS, "once its aliases are filled in"),
    "a number of 5,000 digits": ("pipeline: rlvr\nseed: " + "9" * 5_000, "can't be read"),
    "a date that is none": ("pipeline: rlvr\nseed: 2026-13-45\n", "can't be read"),
    "defaults of a word": ("pipeline: rlvr\ndefaults: x\n", "a list of files"),
    "defaults of a number": ("pipeline: rlvr\ndefaults: [1]\n", "the name of a file"),
    "defaults of itself": ("pipeline: rlvr\ndefaults: [bad]\n", "names itself"),
    "an absolute default": ("pipeline: rlvr\ndefaults: [/a/b, _self_]\n", "relative to the folder"),
    "a section of Hydra": ("pipeline: rlvr\nhydra: {run: {dir: x}}\n", "runs nothing"),
}


@pytest.mark.parametrize("name", YAMLS)
def test_yaml_that_is_too_much_or_misread_is_refused(tmp_path, name):
    text, fragment = YAMLS[name]
    (tmp_path / "bad.yaml").write_text(text)
    before = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path, "bad")
    assert fragment in str(caught.value)
    assert time.process_time() - before < 5


OVERRIDES = [
    ("actor_train.strategy_args.strategy_name=[a]", "actor_train.strategy_args.strategy_name"),
    ("actor_train.world_size=10000000000", "actor_train.world_size"),
    ("actor_train.learning_rate_of_nobody=1", "actor_train.learning_rate_of_nobody"),
    ("actor_train.training_args.learning_rate=1e308", "actor_train.training_args.learning_rate"),
    ("actor_infer.generating_args.temperature=1e18", "actor_infer.generating_args.temperature"),
    ("num_return_sequences_in_group=1000000000000", "num_return_sequences_in_group"),
    ("rewards.math.weight=-1", "rewards.math.weight"),
    ("output_dir=''", "output_dir"),
    (f"output_dir={'x/' * 5_000}", "output_dir"),
    (f"pretrain={'x' * 10_000}", "pretrain"),
    ("actor_train.device_mapping=[[1]]", "actor_train.device_mapping"),
    ("actor_train.model_args.model_config_kwargs.rope_theta=nan", "actor_train.model_args.model_config_kwargs"),
]


@pytest.mark.parametrize(("override", "path"), OVERRIDES, ids=[path for _, path in OVERRIDES])
def test_nonsense_is_refused(job, override, path):
    with pytest.raises(ConfigError) as caught:
        load_config(job, "job", [override])
    assert [violation.path.removesuffix(".rope_theta") for violation in caught.value.violations] == [path]
    assert len(str(caught.value)) < 2000


def test_a_missing_key_hides_nothing_and_raises_no_false_alarm(job):
    (job / "job.yaml").write_text((job / "job.yaml").read_text().replace("prompt_length", "prompt_lenght"))
    with pytest.raises(ConfigError) as caught:
        load_checked(
            job / "job.yaml",
            ["~validation.data_args", "actor_train.training_args.learning_rate=fast", "sequence_length=null",
             "rewards.math.timeout_s=0", "use_kl_loss=true", "pretrain=./nowhere/at/all",
             "actor_train.data_args.file_name=trian.jsonl"],
            machine=Machine(),
        )  # fmt: skip
    assert {violation.path for violation in caught.value.violations} == {
        "prompt_lenght",
        "validation.data_args.file_name",
        "actor_train.training_args.learning_rate",
        "rewards.math.timeout_s",
        "reference",
        "pretrain",
        "actor_train.data_args.file_name",
    }
    lines = {violation.path: violation.where for violation in caught.value.violations}
    number = next(i for i, line in enumerate((job / "job.yaml").read_text().splitlines(), 1) if "lenght" in line)
    assert lines["prompt_lenght"] == f"{job / 'job.yaml'}:{number}"
    assert lines["pretrain"] == "the command line"


def test_thousands_of_unknown_keys_take_no_time(job):
    tree = yaml.safe_load((job / "job.yaml").read_text())
    (job / "many.yaml").write_text(yaml.safe_dump({**tree, **{f"unknown_key_{i}": i for i in range(3000)}}))
    before = time.process_time()
    with pytest.raises(ConfigError, match="2900 more") as caught:
        load_config(job, "many")
    assert len(caught.value.violations) == 3000
    assert time.process_time() - before < 10


def test_a_row_that_is_nested_deeply_is_refused(job):
    (job / "train.jsonl").write_text("[" * 100_000 + "]" * 100_000 + "\n")
    with pytest.raises(ConfigError, match="nested too deeply"):
        load_checked(job / "job.yaml", machine=Machine())


def test_a_working_directory_that_was_deleted_is_said_to_be(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ValueError, match="has been deleted"):
        find_config("job.yaml")


def test_a_hub_that_does_not_answer_is_asked_once(job, monkeypatch):
    asked = []

    def refuse(request, timeout):
        asked.append((request.full_url, timeout))
        raise OSError("no route to host")

    monkeypatch.setattr(model_file_checks, "urlopen", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    model_file_checks.hub_problem.cache_clear()
    with pytest.raises(ConfigError, match="can't be reached .*no route to host"):
        load_checked(job / "job.yaml", ["pretrain=some/model"], machine=Machine())
    model_file_checks.hub_problem.cache_clear()
    assert len(asked) == 1
    assert asked[0][1] <= 2


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_a_hub_that_must_not_be_asked_is_not_asked(job, monkeypatch, variable):
    monkeypatch.setattr(model_file_checks, "urlopen", lambda *_, **__: pytest.fail("asked"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", variable == "HF_HUB_OFFLINE")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", str(int(variable == "TRANSFORMERS_OFFLINE")))
    model_file_checks.hub_problem.cache_clear()
    with pytest.raises(ConfigError, match="'some/model' isn't in the hub's cache, and HF_HUB_OFFLINE forbids"):
        load_checked(job / "job.yaml", ["pretrain=some/model"], machine=Machine())
    model_file_checks.hub_problem.cache_clear()


def test_lengths_that_are_proposed_fit_and_are_no_longer_than_those_given(job, monkeypatch):
    monkeypatch.setattr(prerequisites, "hub_problem", lambda _: "")
    (job / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 40}))
    with pytest.raises(ConfigError, match="prompt_length=24 response_length=16"):
        load_checked(job / "job.yaml", machine=Machine())


def test_one_mini_batch_is_one(job):
    config = load_config(job, "job", ["actor_train.training_args.gradient_accumulation_steps=4"])
    assert "1 mini-batch, x 1 pass = 1 optimizer step per step" in config.batch.explain()
