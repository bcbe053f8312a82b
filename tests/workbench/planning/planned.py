"""Models that are a config.json, and configurations around them, for tests of the plan."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from roll.configs.parsing.loader import read_config
from roll.workbench.planning.machines import parse_machines
from roll.workbench.planning.plan import plan_memory


def model_folder(folder: Path, tree: dict) -> Path:
    """A model folder without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    defaults = {"tie_word_embeddings": False, "max_position_embeddings": 32768}
    (folder / "config.json").write_text(json.dumps({**defaults, **tree}))
    return folder


def write_job(folder: Path, tree: dict) -> Path:
    """A configuration file."""
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def config_of(folder: Path, tree: dict):
    """The configuration that a tree describes; its rules must hold."""
    reading = read_config(write_job(folder, tree), [])
    assert not reading.violations, "\n".join(map(str, reading.violations))
    return reading.config


def plan_of(folder: Path, tree: dict, devices: str):
    """The plan of a tree."""
    return plan_memory(config_of(folder, tree), parse_machines(devices))


def sft_job(model: Path, *, ranks: int, length: int, strategy: str, options: dict, **worker) -> dict:
    """Fine-tuning, one row per pass."""
    training = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    return {
        "pipeline": "sft",
        "pretrain": str(model),
        "num_gpus_per_node": ranks,
        "sequence_length": length,
        "actor_train": {
            "device_mapping": list(range(ranks)),
            "model_args": {"dtype": "bf16"},
            "infer_batch_size": 1,
            "training_args": training,
            "data_args": {"file_name": "rows.jsonl", "messages": "messages"},
            "strategy_args": {"strategy_name": strategy, "strategy_config": options},
            **worker,
        },
    }


def rlvr_job(model: Path, *, slots: int, **more) -> dict:
    """A trainer and engines of vLLM that share all devices."""
    tree = {
        "pipeline": "rlvr",
        "pretrain": str(model),
        "num_gpus_per_node": slots,
        "rollout_batch_size": 16,
        "num_return_sequences_in_group": 8,
        "prompt_length": 1024,
        "response_length": 1024,
        "rewards": {"math": {"name": "math_rule"}},
        "init_kl_coef": 0.0,
        "actor_train": {"data_args": {"file_name": "rows.jsonl"}, "device_mapping": list(range(slots)),
         "model_args": {"dtype": "bf16"},
         "training_args": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 128 // slots}},
        "actor_infer": {"device_mapping": list(range(slots)), "model_args": {"dtype": "bf16"},
         "strategy_args": {"strategy_name": "vllm", "strategy_config": {"gpu_memory_utilization": 0.5}}},
    }  # fmt: skip
    return merged(tree, more)


def merged(tree: dict, changes: dict) -> dict:
    """The tree with changes, section by section."""
    result = dict(tree)
    for key, value in changes.items():
        inner = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if inner else value
    return result
