"""Keys and values that are refused with a reason of their own. Keys of other projects: `other_projects.py`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from roll.configs.catalog.estimator_table import ESTIMATORS
from roll.configs.catalog.pipeline_table import PIPELINES
from roll.configs.catalog.preference_table import PREFERENCE_LOSSES
from roll.configs.errors import nearest

OTHER_PIPELINE_KEYS: dict[str, dict[str, str]] = {
    "rlvr": {
        "reward_normalization": "see reward_norm",
        "train_env_manager": "see rewards.<domain>.rollout for episodes of several turns",
        "val_env_manager": "see validation",
    },
    "agentic": {
        "rewards": "environments give the rewards, see custom_envs",
        "custom_reward_function": "environments give the rewards, see custom_envs; question_answer-v1 takes a function",
        "reward_model": "environments give the rewards, see custom_envs",
        "num_return_sequences_in_group": "write train_env_manager.group_size",
        "validation": "write val_env_manager",
        "global_template": "see custom_envs.<tag>.system_template and turn_template",
        "tag_to_template": "see custom_envs.<tag>.system_template and turn_template",
        "num_train_epochs": "environments have no epochs, write max_steps",
        "truncation": "a context that is too long ends its episode",
        "reward_retries": "a failed environment ends its episode; group_size_redundancy makes up for it",
        "cosine_length": "it knows the limit of one response; max_tokens_per_step bounds a turn",
        "overlong_shaping": "it knows the limit of one response; max_tokens_per_step bounds a turn",
        **dict.fromkeys(
            ("reward_norm", "reward_shift", "reward_scale", "use_reward_scaling", "use_reward_norm"),
            "see reward_normalization",
        ),
        "data_args": "tasks are environments and seeds (custom_envs); prompts take the tokenizer's own chat template",
    },
    "sft": {"response_length": "write sequence_length", "prompt_length": "write sequence_length"},
    "dpo": {
        "response_length": "write sequence_length",
        "prompt_length": "write sequence_length",
        "ipo": "write loss_type: ipo",
        "chosen_key": "it stands in actor_train.data_args, with rejected_key",
        "rejected_key": "it stands in actor_train.data_args, with chosen_key",
    },
    "reward_model": {"response_length": "write sequence_length", "prompt_length": "write sequence_length"},
    "distill": {
        "custom_envs": "environments are of pipeline: agentic, which takes a section teacher, too",
        "messages": "prompts are in data_args.prompt; texts to learn from are rows of pipeline: sft with a teacher",
    },
}
"""By pipeline: keys that only others have, and what it has instead."""

_TURNS = "write optimal_token_baseline: it counts the action tokens of all turns"
UNSUPPORTED_VALUES: dict[str, dict[str, str]] = {
    "adv_estimator": {
        "tir_optimal_token_baseline": _TURNS,
        "grpo_passk": "write pass_at_k",
        "grpo_vectorized": "write grpo",
        "rloo_vectorized": "write rloo",
    },
    "strategy_name": {
        base: f"write {name}_train for a role that trains, {name}_infer for one that doesn't"
        for base, name in {"fsdp": "fsdp2", "fsdp2": "fsdp2", "deepspeed": "deepspeed", "megatron": "megatron"}.items()
    },
    "attn_implementation": {
        "flash_attention_3": "kernels are auto, eager, sdpa and fa2",
        "flex_attention": "kernels are auto, eager, sdpa and fa2",
    },
    "weight_decay_incr_style": {"constant": "without end_weight_decay it is constant; remove both"},
    "lr_scheduler_type": {
        "reduce_lr_on_plateau": "the learning rate follows the steps alone, not what is measured; see cosine and wsd"
    },
}
"""Values of the users' vocabulary, by key, that are refused with a reason of their own."""


_GENERATION = {
    "data.prompt_key": "--prompt_key",
    "data.n_samples": "--n_samples",
    "data.output_path": "--output_path",
    "rollout.temperature": "--temperature",
    "rollout.response_length": "--max_new_tokens",
    "rollout.prompt_length": "--prompt_length",
}
_EVALUATION = {
    "data.prompt_key": "--prompt_key",
    "data.response_key": "--response_key",
    "data.data_source_key": "--data_source_key",
    "data.reward_model_key": "--reward_model_key",
}


def job_command(plain: Mapping[str, Any]) -> str | None:
    """Return the command that does what a file without `pipeline` asks for; None if it is no such job."""
    data = plain.get("data")
    if not isinstance(data, Mapping) or "path" not in data:
        return None
    path = _word(data["path"], "DATA")
    if "output_path" in data or "n_samples" in data:
        words = ["roll eval generate", path, "--model", _word(_at(plain, "model.path"), "MODEL")]
        words += _options(plain, _GENERATION)
        engine = _at(plain, "rollout.name")
        words += ["--engine", engine] if engine in ("vllm", "sglang") else []
    elif "response_key" in data:
        file, name = (_at(plain, f"custom_reward_function.{key}") for key in ("path", "name"))
        reward = f"{_word(file, 'REWARD.py')}:{_word(name, 'compute_score')}"
        words = ["roll eval score", path, "--reward", reward, *_options(plain, _EVALUATION)]
    else:
        return None
    return " ".join(words)


def _options(plain: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    values = {option: _at(plain, key) for key, option in names.items()}
    return [word for option, value in values.items() if value is not None for word in (option, _word(value, "VALUE"))]


def _at(plain: Mapping[str, Any], path: str) -> Any:
    value: Any = plain
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _word(value: Any, otherwise: str) -> str:
    """Return a value as a shell has it; `otherwise` where there is none yet."""
    return shlex.quote(str(value)) if isinstance(value, (str, int, float)) and value != "???" else otherwise


RECIPES = (
    "best_of_n", "cispo", "dapo", "dr_grpo", "gigpo", "grpo", "gspo", "on_policy_distillation", "ppo",
    "reinforce_plus_plus", "rejection_sampling", "vapo",
)  # fmt: skip
"""Algorithms with a file for a CPU and one for GPUs in `examples/recipes`."""
_WORDS = {
    "rl": "rlvr (rows of data with a reward) or agentic (environments)",
    "rlhf": "rlvr, with a reward_model",
    "agent": "agentic", "agents": "agentic",
    "rm": "reward_model", "reward": "reward_model", "reward_modeling": "reward_model",
    "finetune": "sft", "finetuning": "sft", "fine_tuning": "sft", "pretrain": "sft",
    "distillation": "distill", "gkd": "distill",
}  # fmt: skip


def pipeline_hint(name: str) -> str:
    """Return how a run of this algorithm is written, or the nearest name of a pipeline; nothing where there is none."""
    word = name.strip().lower().replace("-", "_").replace("+", "_plus")
    recipe = f"; examples/recipes/{word}_cpu.yaml is such a file" if word in RECIPES else ""
    if word in PIPELINES:
        return f"pipeline: {word}"
    if word == "ppo":
        return f"ppo is an algorithm: pipeline: rlvr or agentic, adv_estimator: gae, and a critic{recipe}"
    if word in ESTIMATORS:
        return f"{word} is an algorithm: pipeline: rlvr or agentic, adv_estimator: {word}{recipe}"
    if word in PREFERENCE_LOSSES:
        return f"{word} is a loss: pipeline: dpo, loss_type: {word}"
    if recipe:
        return f"{word} is an algorithm{recipe}"
    return f"pipeline: {_WORDS[word]}" if word in _WORDS else nearest(name, PIPELINES)
