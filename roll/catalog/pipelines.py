"""Pipelines: values of `pipeline`."""

from __future__ import annotations

from dataclasses import dataclass

from roll.catalog.entries import Entry, implementation


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


PIPELINES: dict[str, Pipeline] = {
    "rlvr": Pipeline(
        path="roll.pipelines.start:run_rlvr",
        config="roll.configs.schema.rlvr_config:RLVRConfig",
        objective="roll.workers.losses:rl_objective",
        rules="roll.configs.rules.validate:RLVR_RULES",
        warnings="roll.configs.rules.validate:RLVR_WARNINGS",
        checks="roll.configs.checks.prerequisites:RLVR_CHECKS",
    ),
    "agentic": Pipeline(
        path="roll.pipelines.start:run_agentic",
        config="roll.configs.schema.agentic_config:AgenticConfig",
        objective="roll.workers.losses:rl_objective",
        rules="roll.configs.rules.validate:AGENTIC_RULES",
        warnings="roll.configs.rules.validate:AGENTIC_WARNINGS",
        checks="roll.configs.checks.prerequisites:AGENTIC_CHECKS",
    ),
    "sft": Pipeline(
        path="roll.pipelines.sft:run_sft",
        config="roll.configs.schema.sft_config:SFTConfig",
        objective="roll.workers.losses:sft_objective",
        rules="roll.configs.rules.validate:SFT_RULES",
        warnings="roll.configs.rules.validate:SFT_WARNINGS",
        checks="roll.configs.checks.prerequisites:SFT_CHECKS",
    ),
}


def pipeline_of(name: str) -> Pipeline:
    """Return the entry called `name`, or the user's own at that path; raise `ValueError` if it is none."""
    if name in PIPELINES:
        return PIPELINES[name]
    found = implementation({}, name, key="pipeline")
    if not isinstance(found, Pipeline):
        raise ValueError(f"pipeline: {name} isn't a pipeline; it must be a roll.catalog.pipelines.Pipeline")
    return found
