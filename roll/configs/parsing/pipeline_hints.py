"""What to write where `pipeline` is the name of an algorithm, or a word for one of ours."""

from __future__ import annotations

from roll.configs.catalog.estimator_table import ESTIMATORS
from roll.configs.catalog.pipeline_table import PIPELINES
from roll.configs.catalog.preference_table import PREFERENCE_LOSSES
from roll.configs.errors import nearest

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
