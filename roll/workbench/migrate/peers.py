"""What other projects do where a file leaves a key out: the tables that docs/generate/peer_tables.py reads off them.

A table is JSON: jobs (classes of arguments, scripts, configurations), their sections, and per key its default, or
[type, default] where the type isn't the default's own. In a section, "=" names another one, by its path, whose keys
it has too, all but those that "-" lists.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from roll.workbench.migrate.overrides import Filler, leaves_of, merged, unexpanded_in

SYSTEMS = {"trl": ("trl",), "openrlhf": ("openrlhf",), "verl": ("verl", "verl_sft", "verl_evaluation")}
"""Systems of `table.py` by the file that their keys are in."""
_FILES = {system: name for name, systems in SYSTEMS.items() for system in systems}
TRL_CLASSES = ("TrainingArguments", "ScriptArguments", "ModelConfig", "DatasetMixtureConfig")
"""Classes that TRL's scripts read besides those of their trainer, which come last and override them."""


@cache
def table(system: str) -> Mapping[str, Any]:
    """Return the table of a project, with its `release`; empty for one that has none."""
    file = Path(__file__).parent / f"{_FILES.get(system)}.json"
    packed = json.loads(file.read_text("utf-8")) if system in _FILES else {}
    return {name: _unpacked(job, packed) for name, job in packed.items()}


def _unpacked(node: Any, root: Mapping[str, Any]) -> Any:
    if not isinstance(node, Mapping):
        return node
    if "=" not in node:
        return {key: _unpacked(value, root) for key, value in node.items()}
    shared: Any = root
    for word in node["="].split("/"):
        shared = shared[word]
    return _changed(_unpacked(shared, root), node)


def _changed(section: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = {key: value for key, value in section.items() if key not in changes.get("-", ())}
    for key, value in changes.items():
        if key not in ("=", "-"):
            before = result[key] if isinstance(result.get(key), Mapping) else {}
            result[key] = _changed(before, value) if isinstance(value, Mapping) else value
    return result


def release(system: str) -> str:
    """Return the release that a project's rows were compared with; empty for one that has no table."""
    return str(table(system).get("release", ""))


def jobs(system: str) -> dict[str, dict[str, tuple[str, Any]]]:
    """Return the keys of a system with type and default, dotted, by the jobs that have them."""
    if _FILES.get(system) == "verl":
        names = [name for name in table(system) if name == system or name == f"{system}_megatron"]
        return {name: {key: (type(value).__name__, value) for key, value in leaves_of(table(system)[name])}
                for name in names}  # fmt: skip
    jobs_read = {name: {key: _typed(entry) for key, entry in job.items()}
             for name, job in table(system).items() if isinstance(job, Mapping)}  # fmt: skip
    inherited = jobs_read.pop("TrainingArguments", {})
    return {name: keys if name in TRL_CLASSES or name.endswith("ScriptArguments") else {**inherited, **keys}
            for name, keys in jobs_read.items()}  # fmt: skip


def _typed(entry: Any) -> tuple[str, Any]:
    return (entry[0], entry[1]) if isinstance(entry, list) else (type(entry).__name__, entry)


def defaults(system: str, tree: Mapping[str, Any], job: str) -> dict[str, Any]:
    """Return what the project takes for every key of its own that nobody writes, by dotted key.

    `tree`: the file's keys, nested. `job`: what is started: a class of TRL's arguments, a script of OpenRLHF, one of
    verl's with `megatron` in it.
    """
    if _FILES.get(system) != "verl":
        names = (*TRL_CLASSES, job.replace("Config", "ScriptArguments"), job) if system == "trl" else (job,)
        result = {key: _typed(entry)[1] for name in names for key, entry in table(system).get(name, {}).items()}
    else:
        full_tree = table(system)["verl_megatron" if "megatron" in job and system == "verl" else system]
        filled = Filler(merged(full_tree, tree), {}).fill(full_tree)
        result = {key: value for key, value in leaves_of(filled) if not unexpanded_in(value)}
    return result
