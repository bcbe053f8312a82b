"""What other projects do where a file leaves a key out: the tables that docs/generate/peer_tables.py reads off them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from roll.workbench.migrate.overrides import Filler, leaves_of, merged, unexpanded_in

_FILES = {"trl": "trl", "openrlhf": "openrlhf", "verl": "verl", "verl_sft": "verl", "verl_evaluation": "verl"}


@cache
def table(system: str) -> Mapping[str, Any]:
    """Return the table of a project, with its `release`; empty for one that has none."""
    file = Path(__file__).parent / f"{_FILES.get(system)}.json"
    return json.loads(file.read_text("utf-8")) if system in _FILES else {}


def release(system: str) -> str:
    """Return the release that a project's rows were compared with; empty for one that has no table."""
    return str(table(system).get("release", ""))


def defaults(system: str, tree: Mapping[str, Any], job: str) -> dict[str, Any]:
    """Return what the project takes for every key of its own that nobody writes, by dotted key.

    `tree`: the file's keys, nested. `job`: what is started: a class of TRL's arguments, a script of OpenRLHF, one of
    verl's with `megatron` in it.
    """
    if system == "trl":
        classes = ("TrainingArguments", "ScriptArguments", job.replace("Config", "ScriptArguments"), "ModelConfig",
                   "DatasetMixtureConfig", job)  # fmt: skip
        found = {key: default for name in classes for key, (_, default) in table(system).get(name, {}).items()}
    elif system == "openrlhf":
        found = {key: default for key, (_, default) in table(system).get(job, {}).items()}
    else:
        whole = dict(table(system).get(system, {}))
        if "megatron" in job and system == "verl":
            whole = merged(whole, table(system)["verl_megatron"])
        filled = Filler(merged(whole, tree), {}).fill(whole)
        found = {key: value for key, value in leaves_of(filled) if not unexpanded_in(value)}
    return found

