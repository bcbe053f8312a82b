"""Whose file it is, and which pipeline of ours it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.workbench.migrate.draft import at, leaves_of
from roll.workbench.migrate.openrlhf_flags import SCRIPTS
from roll.workbench.migrate.sources import Source
from roll.workbench.migrate.table import patterns, systems

CHOICES = ("roll", "verl", "trl", "openrlhf")
"""Values of --from."""
_JOBS = {"main_generation": "verl_generation", "main_eval": "verl_evaluation", "fsdp_sft_trainer": "verl_sft",
         "sft_trainer": "verl_sft"}  # fmt: skip


def system_of(source: Source, given: str | None) -> str:
    """Return the name of a table of `systems()`; raise `ValueError` where nobody can tell."""
    tree = source.tree
    found = given or (
        "openrlhf" if source.job.startswith("train_") else _likely(tree) or ("verl" if source.job else None)
    )
    if found is None:
        words = ", ".join(list(tree)[:5]) or "no keys"
        raise ValueError(f"whose file is it? It has {words}: say --from {', --from '.join(CHOICES)}")
    return _job(tree, source.job) if found == "verl" else found


def _job(tree: Mapping[str, Any], job: str) -> str:
    for word, name in _JOBS.items():
        if word in job:
            return name
    if "actor_rollout_ref" in tree:
        return "verl"
    data = tree.get("data")
    data = data if isinstance(data, Mapping) else {}
    if "n_samples" in data or "output_path" in data:
        return "verl_generation"
    if "path" in data and "trainer" not in tree:
        return "verl_evaluation"
    if "micro_batch_size_per_gpu" in data or "partial_pretrain" in (tree.get("model") or {}) or "optim" in tree:
        return "verl_sft"
    return "verl"


def _likely(tree: Mapping[str, Any]) -> str | None:
    """The system whose table knows most of the keys."""
    leaves = [path.split(".") for path, _ in leaves_of(tree)][:500]
    scores = {
        name: sum(_known(name, path) for path in leaves)
        for name in ("roll", "verl", "verl_sft", "verl_generation", "verl_evaluation", "trl", "openrlhf")
    }
    name = max(scores, key=lambda key: scores[key])
    return (name.split("_")[0] if scores[name] else None) if leaves else None


def _known(name: str, path: list[str]) -> bool:
    row = patterns(name).find(path)
    # A row that takes whatever is below says little.
    return row is not None and not row.key.startswith("**")


def pipeline_of(system: str, tree: Mapping[str, Any], job: str = "") -> str:
    """Return the pipeline that a file becomes."""
    if system == "roll":
        return _roll(tree)
    if system == "trl":
        return _trl(tree)
    if system == "openrlhf":
        return SCRIPTS[job]
    return "sft" if system == "verl_sft" else "rlvr"


def _roll(tree: Mapping[str, Any]) -> str:
    if "custom_envs" in tree or "train_env_manager" in tree:
        return "agentic"
    if tree.get("is_pure_opd") or "student_train" in tree:
        return "distill"
    if "student" in tree or "sft_train" in tree:
        return "sft"
    if "chosen_key" in tree or "rejected_key" in tree or "ipo" in tree:
        return "dpo"
    known = tree.get("pipeline")
    return known if isinstance(known, str) and known in ("rlvr", "agentic", "distill", "sft", "dpo") else "rlvr"


def _trl(tree: Mapping[str, Any]) -> str:
    if "lmbda" in tree or "teacher_model_name_or_path" in tree:
        return "distill"
    if tree.keys() & {"num_generations", "max_completion_length", "reward_funcs", "num_iterations", "use_vllm"}:
        return "rlvr"
    if "center_rewards_coefficient" in tree:
        return "reward_model"
    preference = {"label_smoothing", "precompute_ref_log_probs", "reference_free", "rpo_alpha", "desirable_weight",
                  "simpo_gamma", "truncation_mode", "beta"}  # fmt: skip
    return "dpo" if tree.keys() & preference else "sft"


def job_of(system: str, source: Source) -> str:
    """Return the name of the job whose defaults a file has: for TRL the class of its arguments,
    for verl with `megatron` in it where that is the backend.
    """
    if system != "trl":
        actor = at(source.tree, "actor_rollout_ref.actor", {})
        backend = (at(actor, "strategy", "megatron" if "megatron" in actor else ""), source.tree.get("model_engine"))
        return f"{source.job} megatron" if "megatron" in backend else source.job
    classes = {"distill": "DistillationConfig", "dpo": "DPOConfig", "sft": "SFTConfig", "reward_model": "RewardConfig"}
    return classes.get(_trl(source.tree), "GRPOConfig")


def name_of(system: str) -> str:
    """Return a system's name as its project writes it."""
    return systems()[system].name


def given_in(tree: Mapping[str, Any], path: str) -> bool:
    """Return whether a file says something there."""
    return at(tree, path) is not None
