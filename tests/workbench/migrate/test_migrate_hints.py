"""Keys of ROLL, verl and TRL in a configuration: the answer names their counterpart and its place, and none misleads;
what is harmless is taken as it is meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.configs.errors import ConfigError
from roll.configs.parsing.build_config import build_partly
from roll.configs.parsing.loader import PIPELINES, load_config, read_config
from roll.workbench.migrate.table import PeerKey, by_word, systems

SHELVES = [name for name in systems() if name not in ("verl_generation", "verl_evaluation")]


def tree_with(path: str, value: Any, pipeline: str) -> dict[str, Any]:
    own = {
        "rlvr": {"rewards": {"m": {"name": "math_rule"}}, "actor_train": {"data_args": {"file_name": "x.jsonl"}}},
        "agentic": {"custom_envs": {"m": {"env_type": "sokoban-v1"}}},
        "sft": {"actor_train": {"data_args": {"file_name": "x.jsonl", "messages": "messages"}}},
        "dpo": {"actor_train": {"data_args": {"file_name": "x.jsonl"}}},
    }[pipeline]
    tree: dict[str, Any] = {"pipeline": pipeline, "pretrain": "m", **own}
    node = tree
    *sections, last = path.split(".")
    for word in sections:
        if not isinstance(node.get(word), dict):
            node[word] = {}
        node = node[word]
    node[last] = value
    return tree


def answer(path: str, pipeline: str) -> str:
    """What the check says of a key; empty if it takes it."""
    _, found, _ = build_partly(PIPELINES[pipeline], tree_with(path, "zzz", pipeline), pipelines=PIPELINES)
    return " ".join(str(one) for one in found if one.path == path or path.startswith(f"{one.path}."))


def pipeline_for(system: str, row: PeerKey) -> str:
    if row.key.startswith(("custom_envs.", "<manager>.", "reward_normalization.")):
        return "agentic"
    if row.key == "train_batch_size":  # of ROLL's preferences; verl's is data.train_batch_size
        return "dpo"
    return "sft" if system == "verl_sft" else "rlvr"


def names_counterpart(said: str, row: PeerKey) -> bool:
    return any(place.rpartition(".")[2] in said for place in row.to)


@pytest.mark.parametrize("system", SHELVES)
def test_a_dotted_key_gets_its_counterparts_name(system: str):
    unnamed = []
    for row in systems()[system].rows:
        if "**" in row.key:
            continue
        key = row.key.replace("<role>", "actor_train").replace("<name>", "m").replace("<manager>", "train_env_manager")
        said = answer(key, pipeline_for(system, row))
        assert "did you mean" not in said or names_counterpart(said, row), f"{key}: {said}"
        if said and row.fate in ("translated", "decided") and not names_counterpart(said, row):
            unnamed.append(f"{key} -> {row.to[0]}: {said[:200]}")
    # A tracker's options are those of its own section.
    assert [line for line in unnamed if not line.startswith("tracker_kwargs.")] == []


def test_a_leaf_word_gets_a_counterparts_name_and_none_misleads():
    unnamed, misleading = [], []
    for word, found in by_word(-1).items():
        rows = [row for name, row in found if name in SHELVES and "**" not in row.key]
        if not rows:
            continue
        said = {pipeline: answer(word, pipeline) for pipeline in ("rlvr", "agentic", "sft", "dpo")}
        with_counterpart = [row for row in rows if row.fate in ("translated", "decided")]
        for text in filter(None, said.values()):
            if "did you mean" in text and not any(names_counterpart(text, row) for row in rows):
                misleading.append(f"{word}: {text[:200]}")
        texts = " ".join(said.values())
        if (
            with_counterpart
            and all(said.values())
            and not any(names_counterpart(texts, row) for row in with_counterpart)
        ):
            unnamed.append(f"{word}: {texts[:300]}")
    assert unnamed == []
    assert misleading == []


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.nnodes=2", "write num_nodes"),
        ("actor_rollout_ref.rollout.n=8", "write num_return_sequences_in_group"),
        ("data.prompt_key=prompt", "write actor_train.data_args.prompt"),
        ("+trainer.total_epochs=3", "write num_train_epochs"),
        ("algorithm.kl_ctrl.kl_coef=0.1", "write init_kl_coef"),
        ("trainer=null", "total_epochs is num_train_epochs"),
        ("nnodes=2", "write num_nodes"),
        ("checkpoint_config.type=file_system", "checkpoint_config.output_dir says it"),
    ],
)
def test_an_override_of_another_system_is_answered_with_ours(override: str, said: str, job: Path):
    with pytest.raises(ConfigError) as caught:
        load_config(job, "job", [override])
    assert said in str(caught.value)
    assert "pretrain" not in str(caught.value)


def test_a_section_of_verl_is_answered_key_by_key(job: Path):
    with pytest.raises(ConfigError) as caught:
        load_config(job, "job", ["trainer={nnodes: 2, save_freq: 5}", "data.train_batch_size=8"])
    answers = {violation.path: violation.fix for violation in caught.value.violations}
    assert answers["trainer.nnodes"] == "write num_nodes"
    assert answers["trainer.save_freq"] == "write save_steps"
    assert answers["data.train_batch_size"].startswith("write rollout_batch_size")


# --- what is harmless ------------------------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path: Path) -> Path:
    tree = tree_with("reference.model_args.dtype", "bf16", "rlvr") | {"executor": "inline", "hydra": {
        "run": {"dir": "."}, "output_subdir": None}}  # fmt: skip
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(tree), "utf-8")
    return tmp_path


def test_hf_infer_as_a_scoring_role_is_fsdp2_infer_with_a_note(job: Path):
    reading = read_config(
        job / "job.yaml", ["reference.strategy_args={strategy_name: hf_infer, strategy_config: null}"]
    )
    assert not reading.violations
    assert reading.config.reference.strategy_args.strategy_name == "fsdp2_infer"
    assert any("hf_infer is fsdp2_infer" in note for note in reading.notes)


def test_harmless_keys_are_taken_as_they_are_meant(job: Path):
    words = ["track_with=[stdout,wandb]", "tracker_kwargs={log_dir: /tb, project: mine, notes: n}",
             "actor_train.model_args.model_type=null"]  # fmt: skip
    reading = read_config(job / "job.yaml", words)
    assert not reading.violations
    assert reading.config.tracker_kwargs == {"wandb": {"project": "mine", "notes": "n"}}
    assert reading.config.logging_dir == "/tb"
    assert len(reading.notes) == 4
    reading = read_config(job / "job.yaml", ["track_with=[stdout,wandb]", "project_name=mine"])
    assert reading.config.tracker_kwargs == {"wandb": {"project": "mine"}}


def test_hydras_own_settings_are_refused_where_they_ask_for_something(job: Path):
    (job / "job.yaml").write_text("hydra: {run: {dir: /out}}\npipeline: rlvr\n", "utf-8")
    with pytest.raises(ConfigError, match="Hydra composes"):
        load_config(job, "job")


@pytest.mark.parametrize("where", ["../config", "../../config", "config", "./config"])
def test_rolls_presets_resolve_where_people_write_them(where: str, tmp_path: Path):
    folder = tmp_path / "a" / "b" / "job"
    folder.mkdir(parents=True)
    tree = tree_with("actor_train.strategy_args", {"strategy_name": "deepspeed_train",
                     "strategy_config": "${deepspeed_zero2}"}, "agentic")  # fmt: skip
    tree |= {
        "defaults": [f"{where}/deepspeed_zero2@_here_", f"{where}/envs@_here_"],
        "max_tokens_per_step": 17,
        "custom_envs": {"lake": "${custom_env.FrozenLake}"},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(tree), "utf-8")
    reading = read_config(folder / "job.yaml")
    assert not reading.violations
    assert reading.config.actor_train.strategy_args.strategy_config.stage == 2
    assert reading.config.custom_envs["lake"].max_tokens_per_step == 17


def test_an_own_preset_wins_over_the_one_of_the_package(tmp_path: Path):
    (tmp_path / "config").mkdir()
    (tmp_path / "job").mkdir()
    (tmp_path / "config" / "deepspeed_zero2.yaml").write_text(
        "deepspeed_zero2: {zero_optimization: {stage: 1}}\n", "utf-8"
    )
    tree = tree_with("actor_train.strategy_args", {"strategy_name": "deepspeed_train",
                     "strategy_config": "${deepspeed_zero2}"}, "rlvr")  # fmt: skip
    tree["actor_train"]["data_args"] = {"file_name": "x.jsonl"}
    tree["defaults"] = ["../config/deepspeed_zero2@_here_"]
    (tmp_path / "job" / "job.yaml").write_text(yaml.safe_dump(tree), "utf-8")
    reading = read_config(tmp_path / "job" / "job.yaml")
    assert reading.config.actor_train.strategy_args.strategy_config.stage == 1
