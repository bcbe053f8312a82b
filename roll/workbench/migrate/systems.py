"""Whose file it is, and which pipeline of ours it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.workbench.migrate import trl
from roll.workbench.migrate.openrlhf_flags import SCRIPTS
from roll.workbench.migrate.overrides import at, leaves_of
from roll.workbench.migrate.sources import PeerFile
from roll.workbench.migrate.table import patterns, systems

CHOICES = ("roll", "verl", "trl", "openrlhf")
"""Values of --from."""
_JOBS = {"main_generation": "verl_generation", "main_eval": "verl_evaluation", "fsdp_sft_trainer": "verl_sft",
         "sft_trainer": "verl_sft"}  # fmt: skip


def system_of(source: PeerFile, requested: str | None) -> str:
    """Return the name of a table of `systems()`; raise `ValueError` where nobody can tell."""
    system = requested or source.system or _likely(source.tree)
    if requested and source.job and source.system not in ("", requested):
        raise ValueError(
            f"it starts {source.job}, a job of {systems()[source.system].name}: leave out --from {requested}"
        )
    if system is None:
        words = ", ".join(list(source.tree)[:5]) or "no keys"
        raise ValueError(f"whose file is it? It has {words}: say --from {', --from '.join(CHOICES)}")
    return _job(source.tree, source.job) if system == "verl" else system


def _job(tree: Mapping[str, Any], job: str) -> str:
    for word, name in _JOBS.items():
        if word in job:
            return name
    if "actor_rollout_ref" in tree:
        return "verl"
    data, model = ({} if not isinstance(section := tree.get(key), Mapping) else section for key in ("data", "model"))
    if "n_samples" in data or "output_path" in data:
        return "verl_generation"
    if "path" in data and "trainer" not in tree:
        return "verl_evaluation"
    tunes = "micro_batch_size_per_gpu" in data or "partial_pretrain" in model or "optim" in tree
    return "verl_sft" if tunes else "verl"


def _likely(tree: Mapping[str, Any]) -> str | None:
    """Return the system whose table knows most of the keys."""
    leaves = [path.split(".") for path, _ in leaves_of(tree)][:500]
    scores = dict.fromkeys(("roll", "verl", "verl_sft", "verl_generation", "verl_evaluation", "trl", "openrlhf"), 0)
    for name in scores:
        rows = [patterns(name).find(path) for path in leaves]
        # A row that takes whatever is below says little.
        scores[name] = sum(row is not None and not row.key.startswith("**") for row in rows)
    best = max(scores, key=lambda name: scores[name])
    return best.partition("_")[0] if scores[best] else None


def pipeline_of(system: str, tree: Mapping[str, Any], job: str = "") -> str:
    """Return the pipeline that a file becomes."""
    if system == "roll":
        return _roll(tree)
    if system == "trl":
        return trl.TRAINERS[trl.trainers_of(tree, job)[0]]
    if system == "openrlhf":
        return SCRIPTS[job]
    return "sft" if system == "verl_sft" else "rlvr"


def _roll(tree: Mapping[str, Any]) -> str:
    if "custom_envs" in tree or "train_env_manager" in tree:
        return "agentic"
    if tree.get("is_pure_opd") or tree.get("use_opd") or tree.get("opsd_mode") or "student_train" in tree:
        return "distill"
    if "student" in tree or "sft_train" in tree:
        return "sft"
    if "chosen_key" in tree or "rejected_key" in tree or "ipo" in tree:
        return "dpo"
    known = tree.get("pipeline")
    return known if isinstance(known, str) and known in ("rlvr", "agentic", "distill", "sft", "dpo") else "rlvr"


def job_of(system: str, source: PeerFile) -> str:
    """Return the name of the job whose defaults a file has: for TRL the class of its arguments,
    for verl with `megatron` in it where that is the backend.
    """
    if system == "trl":
        return trl.trainers_of(source.tree, source.job)[0]
    actor = at(source.tree, "actor_rollout_ref.actor", {})
    backend = (at(actor, "strategy", "megatron" if "megatron" in actor else ""), source.tree.get("model_engine"))
    return f"{source.job} megatron" if "megatron" in backend else source.job
