"""Folders of vision-language models: refused by name where they can't be trained as text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll.configs.checks.data_file_checks import data_checks
from roll.configs.checks.model_file_checks import media_checks
from roll.configs.checks.prerequisites import model_checks
from roll.configs.parsing.loader import load_config

JOB = """
pipeline: sft
executor: inline
pretrain: {folder}
max_steps: 1
sequence_length: 8
actor_train: {{data_args: {{file_name: {folder}/rows.jsonl}}}}
"""


def folder_of(path: Path, **tree: object) -> Path:
    (path / "config.json").write_text(json.dumps(tree))
    (path / "job.yaml").write_text(JOB.format(folder=path))
    return path


def test_a_vision_language_folder_is_refused_as_pretrain(tmp_path: Path) -> None:
    tree = {
        "model_type": "smolvlm",
        "architectures": ["SmolVLMForConditionalGeneration"],
        "vision_config": {"depth": 1},
    }
    folder = folder_of(tmp_path, **tree)
    (violation,) = model_checks(load_config(folder, "job", []))
    assert str(violation).startswith(
        "pretrain: SmolVLMForConditionalGeneration reads pictures, video or sound (vision_"
    )
    assert "these are given pictures: qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe" in str(violation)
    folder_of(tmp_path, model_type="llava_llama", mm_vision_tower="openai/clip")  # the form of its own repository
    assert [violation.path for violation in model_checks(load_config(folder, "job", []))] == ["pretrain"]
    for text in ({"model_type": "qwen3"}, {"model_type": "gemma3", "vision_config": {}, "text_config": {}}):
        folder_of(tmp_path, **text)
        assert list(model_checks(load_config(folder, "job", []))) == []


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_a_model_that_is_given_pictures_trains_on_backends_that_give_it_some(tmp_path: Path, model_type: str) -> None:
    folder = folder_of(tmp_path, model_type=model_type, vision_config={"depth": 1})
    freezing = "actor_train.model_args.freeze_vision_tower=true"
    for backend in ("fsdp2_train", "deepspeed_train"):
        backend_key = f"actor_train.strategy_args.strategy_name={backend}"
        assert list(model_checks(load_config(folder, "job", [backend_key, freezing]))) == []
    (violation,) = model_checks(load_config(folder, "job", ["actor_train.strategy_args.strategy_name=megatron_train"]))
    assert str(violation).startswith(
        "actor_train.strategy_args.strategy_name: megatron_train doesn't run models that read pictures, as "
        f"{model_type} does"
    )
    ranks = ["actor_train.world_size=2", "num_gpus_per_node=2", "executor=ray"]
    cut = [*ranks, "actor_train.model_args.ulysses_size=2"]
    (violation,) = model_checks(load_config(folder, "job", cut))
    assert str(violation).startswith("actor_train.model_args.ulysses_size: rows with pictures can't be cut")


def test_a_model_that_is_given_none_has_no_tower_to_freeze(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, model_type="qwen3")
    (violation,) = model_checks(load_config(folder, "job", ["actor_train.model_args.freeze_projector=true"]))
    assert str(violation).startswith("actor_train.model_args.freeze_projector: ")
    assert "models of type qwen3 aren't given pictures" in str(violation)


def test_the_kinds_that_are_refused_are_ones_that_transformers_does_not_load_as_language_models() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    # Those that train on text: tests/configs/test_configs_families.py.
    for refused in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "mistral3", "smolvlm", "internvl"):
        assert refused not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_config_that_says_nothing_is_left_to_transformers(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert list(media_checks("pretrain", str(tmp_path))) == []


def test_a_first_row_with_a_picture_is_refused_before_the_start(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, model_type="qwen3")
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "images": ["a.png"]}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (violation,) = data_checks(load_config(folder, "job", []))
    assert "rows.jsonl:1: the column 'images' holds pictures" in str(violation)
