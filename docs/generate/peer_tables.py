"""Names, types and defaults of the keys of TRL, verl and OpenRLHF, read from their installed packages.

    python docs/generate/peer_tables.py FOLDER [--write]

FOLDER has the three as `pip install --no-deps --target FOLDER trl==1.16.0 verl==0.9.1 openrlhf==0.11.2` puts them.
It compares them with `roll/workbench/migrate/*.json`, from which `roll migrate` takes what a file leaves out, and says
how many of each project's keys have a row; `--write` writes those files anew. What TRL inherits is that of the
installed transformers. For a new release: install it, write, and mend the rows that are printed.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import json
import re
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import yaml

TABLES = Path(__file__).parents[2] / "roll" / "workbench" / "migrate"
TRL = {
    "trl": ("GRPOConfig", "RLOOConfig", "DPOConfig", "KTOConfig", "SFTConfig", "RewardConfig", "DistillationConfig",
            "ModelConfig", "ScriptArguments", "DatasetMixtureConfig"),
    "trl.scripts.grpo": ("GRPOScriptArguments",),
    "trl.scripts.rloo": ("RLOOScriptArguments",),
}  # fmt: skip
"""Classes of arguments, by the module that has them."""
VERL = {
    "verl": "_generated_ppo_trainer.yaml",
    "verl_megatron": "_generated_ppo_megatron_trainer.yaml",
    "verl_evaluation": "evaluation.yaml",
}
OPENRLHF = ("train_ppo_ray", "train_sft", "train_dpo", "train_rm")


def trl(folder: Path) -> dict[str, Any]:
    """Return classes -> arguments -> [type, default]; `TrainingArguments` has what all of them inherit unchanged."""
    sys.path.insert(0, str(folder))
    found = {name: _fields(getattr(importlib.import_module(module), name))
             for module, names in TRL.items() for name in names}  # fmt: skip
    base = _fields(importlib.import_module("transformers").TrainingArguments)
    own = {name: {key: value for key, value in fields.items() if base.get(key) != value}
           for name, fields in found.items()}  # fmt: skip
    return {"TrainingArguments": base, **own}


def _fields(cls: type) -> dict[str, list[Any]]:
    return {spec.name: [re.sub(r"typing\.|<class '|'>", "", str(spec.type)), _plain(_default(spec))]
            for spec in dataclasses.fields(cls) if spec.init}  # fmt: skip


def _default(spec: dataclasses.Field[Any]) -> Any:
    if spec.default is not dataclasses.MISSING:
        return spec.default
    return None if spec.default_factory is dataclasses.MISSING else spec.default_factory()


def _plain(value: Any) -> Any:
    """A default as YAML writes it."""
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    value = getattr(value, "value", value)
    return value if isinstance(value, (str, int, float, bool, dict, type(None))) else str(value)


def verl(folder: Path) -> dict[str, Any]:
    """Return jobs -> the configuration that Hydra composes without an override, references unfilled."""
    config = folder / "verl" / "trainer" / "config"
    found = {name: _kept(yaml.safe_load((config / file).read_text("utf-8"))) for name, file in VERL.items()}
    megatron = found.pop("verl_megatron")
    found["verl_megatron"] = _differing(megatron, found["verl"])
    found["verl_sft"] = _kept(_composed(config, "sft_trainer_engine"))
    return found


def _kept(node: Any) -> Any:
    """Without the names of verl's classes and the sections of its profilers, which are many and change nothing."""
    if not isinstance(node, Mapping):
        return node
    return {key: _kept(value) for key, value in node.items() if key != "_target_" and "profiler" not in key}


def _composed(folder: Path, name: str) -> dict[str, Any]:
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(str(folder), version_base=None):
        return OmegaConf.to_container(compose(name), resolve=False)  # type: ignore[return-value]


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in one.items():
        before = other.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            if inside := _differing(value, before):
                found[key] = inside
        elif value != before or key not in other:
            found[key] = value
    return found


def openrlhf(folder: Path) -> dict[str, Any]:
    """Return scripts -> flags -> [type, default]: of each script only the lines that build its parser are run."""
    return {script: _flags((folder / "openrlhf" / "cli" / f"{script}.py").read_text("utf-8")) for script in OPENRLHF}


def _flags(source: str) -> dict[str, list[Any]]:
    (main,) = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    end = next(at for at, node in enumerate(main.body) if "parse_args" in ast.unparse(node))
    names: dict[str, Any] = {"argparse": argparse}
    exec("from datetime import datetime\n" + ast.unparse(ast.Module(main.body[:end], [])), names)
    return {action.option_strings[-1].lstrip("-"): [_kind(action), _plain(action.default)]
            for action in names["parser"]._actions if action.dest != "help"}  # fmt: skip


def _kind(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "bool"
    kind = getattr(action.type, "__name__", "str")
    return kind if action.nargs is None else f"list[{kind}]"


READERS = {"trl": trl, "verl": verl, "openrlhf": openrlhf}


def table(name: str, folder: Path) -> dict[str, Any]:
    """Return the table of one project: its release, and its keys."""
    releases = {found.name.lower(): found.version for found in distributions(path=[str(folder)])}
    return {"release": releases[name], **READERS[name](folder)}


def written(found: Mapping[str, Any]) -> str:
    """Return a table as JSON in lines of at most 120 columns."""
    # A comma inside of a text is no place to break a line.
    parts = re.findall(r'((?:"(?:[^"\\]|\\.)*"|[^",])+,?)\s?', json.dumps(found))
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1]) + len(part) > 118:
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{part}"
    return "\n".join(lines) + "\n"


def main() -> int:
    """Compare, or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    differing = 0
    for name in READERS:
        now, file = table(name, options.folder), TABLES / f"{name}.json"
        if options.write:
            file.write_text(written(now), "utf-8")
        before = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        differing += now != before
        state = "as written" if now == before else f"differs from {file.name}"
        sys.stdout.write(f"{name} {now['release']}: {state}\n")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
