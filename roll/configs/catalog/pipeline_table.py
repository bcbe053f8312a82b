"""Pipelines: values of `pipeline`."""

from __future__ import annotations

from dataclasses import dataclass

from roll.configs.catalog.entries import Entry, implementation


@dataclass(frozen=True, kw_only=True)
class Pipeline(Entry):
    """A pipeline: `path` is the function that runs a configuration to its end.

    One of the user's own is such an object in their file, with paths to what is there or here: `pipeline: my.py:pairs`.
    """

    config: str
    """Class of its configuration, a subclass of `RunConfig`."""
    objective: str
    """`(config, kind) -> LossFn`: what a role is trained on."""
    rules: str
    """Rules between keys, a tuple in the order of their messages."""
    warnings: str
    """What is allowed but probably not meant, a tuple."""
    checks: str
    """What files, folders and functions must be like, a tuple."""


def _built_in(name: str, run: str, config: str, objective: str, losses: str = "worker_losses") -> Pipeline:
    room = "roll.configs"
    return Pipeline(
        path=f"roll.pipelines.{run}",
        config=f"{room}.schema.{config}",
        objective=f"roll.pipelines.workers.{losses}:{objective}",
        rules=f"{room}.rules.validate:{name}_RULES",
        warnings=f"{room}.rules.validate:{name}_WARNINGS",
        checks=f"{room}.checks.prerequisites:{name}_CHECKS",
    )


PIPELINES: dict[str, Pipeline] = {
    "rlvr": _built_in("RLVR", "start:run_rlvr", "rlvr_config:RLVRConfig", "rl_objective"),
    "agentic": _built_in("AGENTIC", "start:run_agentic", "agentic_config:AgenticConfig", "rl_objective"),
    "distill": _built_in("DISTILL", "start:run_rlvr", "rlvr_config:DistillConfig", "rl_objective"),
    "sft": _built_in("SFT", "offline.sft:run_sft", "sft_config:SFTConfig", "sft_objective"),
    "dpo": _built_in("DPO", "offline.dpo:run_dpo", "preference_config:DPOConfig", "dpo_objective", "preference_losses"),
    "reward_model": _built_in(
        "REWARD_MODEL",
        "offline.reward_model:run_reward_model",
        "preference_config:RewardTrainingConfig",
        "reward_objective",
        "preference_losses",
    ),
}


def pipeline_of(name: str) -> Pipeline:
    """Return the entry called `name`, or the user's own at that path; raise `ValueError` if it is none."""
    if name in PIPELINES:
        return PIPELINES[name]
    pipeline = implementation({}, name, key="pipeline")
    if not isinstance(pipeline, Pipeline):
        raise ValueError(f"pipeline: {name} isn't a pipeline; it must be a {Pipeline.__module__}.Pipeline")
    return pipeline
