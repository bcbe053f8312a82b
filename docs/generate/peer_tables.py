"""Names, types and defaults of the keys of TRL, verl and OpenRLHF, read from their installed packages.

    pip install --no-deps --target FOLDER trl==1.16.0 verl==0.9.1 openrlhf==0.11.2
    python docs/generate/peer_tables.py FOLDER [--write] [--list]

It compares the packages with `roll/workbench/migrate/*.json`, from which `roll migrate` takes what a file leaves out,
and with the rows of `*.keys`, and prints a table. It fails where a default differs, a row names a key that the release
hasn't, or a key that must have a row has none; `--list` names them. `--write` writes the tables anew. What TRL
inherits is that of the installed transformers. For a new release: install it, write, and mend the rows that are listed.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import yaml

from roll.workbench.migrate import peers
from roll.workbench.migrate.peers import leaves_of
from roll.workbench.migrate.table import NO_DEFAULT, PeerKey, is_earlier, patterns, systems

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
    result = {name: _fields(getattr(importlib.import_module(module), name))
             for module, names in TRL.items() for name in names}  # fmt: skip
    base = _fields(importlib.import_module("transformers").TrainingArguments)
    own = {name: {key: value for key, value in fields.items() if base.get(key) != value}
           for name, fields in result.items()}  # fmt: skip
    return {"TrainingArguments": base, **own}


def _fields(cls: type) -> dict[str, list[Any]]:
    return {spec.name: [re.sub(r"<class '|'>|\b(?:\w+\.)+", "", str(spec.type)), _plain(_default(spec))]
            for spec in dataclasses.fields(cls) if spec.init}  # fmt: skip


def _default(spec: dataclasses.Field[Any]) -> Any:
    if spec.default is not dataclasses.MISSING:
        return spec.default
    return None if spec.default_factory is dataclasses.MISSING else spec.default_factory()


def _plain(value: Any) -> Any:
    """Return a default as YAML writes it."""
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    value = getattr(value, "value", value)
    return value if isinstance(value, (str, int, float, bool, dict, type(None))) else str(value)


def verl(folder: Path) -> dict[str, Any]:
    """Return jobs -> the configuration that Hydra composes without an override, references unfilled."""
    config = folder / "verl" / "trainer" / "config"
    result = {name: _kept(yaml.safe_load((config / file).read_text("utf-8"))) for name, file in VERL.items()}
    return {**result, "verl_sft": _kept(_composed(config, "sft_trainer_engine"))}


def _kept(node: Any) -> Any:
    """Return fields without the names of verl's classes and the sections of its profilers, which change nothing."""
    if not isinstance(node, Mapping):
        return node
    return {key: _kept(value) for key, value in node.items() if key != "_target_" and "profiler" not in key}


def _composed(folder: Path, name: str) -> dict[str, Any]:
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(str(folder), version_base=None):
        return OmegaConf.to_container(compose(name), resolve=False)  # type: ignore[return-value]


def openrlhf(folder: Path) -> dict[str, Any]:
    """Return scripts -> flags -> [type, default]: of each script only the lines that build its parser are run."""
    return {script: _flags((folder / "openrlhf" / "cli" / f"{script}.py").read_text("utf-8")) for script in OPENRLHF}


def _flags(source: str) -> dict[str, list[Any]]:
    (main,) = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    end = next(at for at, node in enumerate(main.body) if "parse_args" in ast.unparse(node))
    names: dict[str, Any] = {"argparse": argparse, "datetime": _Clock}
    exec(ast.unparse(ast.Module(main.body[:end], [])), names)
    return {action.option_strings[-1].lstrip("-"): [_kind(action), _plain(action.default)]
            for action in names["parser"]._actions if action.dest != "help"}  # fmt: skip


class _Clock:
    """In place of `datetime`: the names of runs have the format of the time in them, not the time."""

    @classmethod
    def now(cls) -> type[_Clock]:
        return cls

    @staticmethod
    def strftime(text: str) -> str:
        return text


def _kind(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "bool"
    kind = getattr(action.type, "__name__", "str")
    return kind if action.nargs is None else f"list[{kind}]"


READERS = {"trl": trl, "verl": verl, "openrlhf": openrlhf}


def table(name: str, folder: Path) -> dict[str, Any]:
    """Return the table of one project: its release, and its keys."""
    releases = {distribution.name.lower(): distribution.version for distribution in distributions(path=[str(folder)])}
    inherited = {"transformers": version("transformers")} if name == "trl" else {}
    return {"release": releases[name], **inherited, **READERS[name](folder)}


# --- as JSON ---------------------------------------------------------------------------------------------------------


def packed(fields_by_name: Mapping[str, Any], typed: bool) -> dict[str, Any]:
    """Return a table in the short form that `peers.py` reads."""
    shared: dict[str, Any] = {}
    return {name: _packed(_short(job, typed), name, shared) for name, job in fields_by_name.items()}


def _short(node: Any, typed: bool) -> Any:
    """Return the default alone where its type is the key's."""
    if isinstance(node, Mapping):
        return {key: _short(value, typed) for key, value in node.items()}
    plain = typed and isinstance(node, list) and node[0] == type(node[1]).__name__ and node[0] not in ("list", "dict")
    return node[1] if plain else node


def _packed(node: Any, path: str, shared: dict[str, Any]) -> Any:
    """Return a section as what differs from one before it, where that is shorter; `shared`: those before it."""
    if not isinstance(node, Mapping):
        return node
    ways = [{key: _packed(value, f"{path}/{key}", dict(shared)) for key, value in node.items()}]
    ways += [{"=": other, **_difference(node, section)} for other, section in shared.items()]
    best = min(ways, key=lambda way: len(json.dumps(way)))
    if best is ways[0]:
        best = {key: _packed(value, f"{path}/{key}", shared) for key, value in node.items()}
        shared[path] = node
    return best


def _difference(node: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    difference: dict[str, Any] = {"-": gone} if (gone := [key for key in other if key not in node]) else {}
    for key, value in node.items():
        before = other.get(key, NO_DEFAULT)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            if value != before:
                difference[key] = _difference(value, before)
        elif value != before or type(value) is not type(before):
            difference[key] = value
    return difference


def written(tables: Mapping[str, Any]) -> str:
    """Return a table as JSON in lines of at most 120 columns."""
    # A comma inside of a text is no place to break a line.
    parts = re.findall(r'(?:"(?:[^"\\]|\\.)*"|[^",])+,?', json.dumps(tables, separators=(",", ":")))
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1]) + len(part) > 120:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines) + "\n"


# --- compared --------------------------------------------------------------------------------------------------------


VERL_SECTIONS = ("algorithm", "data", "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "trainer",
                 "actor_rollout_ref.model", "actor_rollout_ref.ref", "critic", "reward", "distillation")  # fmt: skip
"""Sections that the printed table counts apart; of the first five every key must have a row."""
MUST = {*VERL_SECTIONS[:5], *(name for name in TRL["trl"] if name.endswith("Config")), *OPENRLHF}


def sections(name: str, folder: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the system, the title and the keys of every section of a project that is counted apart."""
    fields_by_job = READERS[name](folder)
    if name != "verl":
        for job, fields in fields_by_job.items():
            yield name, job, list(fields)
        return
    config = folder / "verl" / "trainer" / "config"
    trees = [yaml.safe_load((config / VERL[job]).read_text("utf-8")) for job in ("verl", "verl_megatron")]
    keys = list(dict.fromkeys(key for tree in trees for key, _ in leaves_of(tree) if "_target_" not in key))
    for section in VERL_SECTIONS:
        yield name, section, [key for key in keys if key.startswith(f"{section}.")]
    yield name, "the rest", [key for key in keys if not key.startswith(tuple(f"{word}." for word in VERL_SECTIONS))]
    for job in ("verl_sft", "verl_evaluation"):
        yield job, job, [key for key, _ in leaves_of(fields_by_job[job])]


def without_row(system: str, keys: Iterable[str]) -> list[str]:
    """Return the keys that no row of a system is for."""
    rows = patterns(system)
    return [key for key in keys for words in [key.split(".")] if not (rows.find(words) or rows.is_section(words))]


def unknown_rows(name: str, folder: Path) -> list[str]:
    """Return rows whose key the release of a project hasn't, and that isn't said to be of an earlier one."""
    keys = {key for _, _, section in sections(name, folder) for key in section}
    others = dict(_other_names(name, folder))
    keys |= others.keys()
    parents = {key[:end] for key in keys for end in range(len(key)) if key[end] == "."}
    empty = {key for system in peers.SYSTEMS[name] for job in peers.jobs(system).values()
             for key, (_, default) in job.items() if default in (None, {})}  # fmt: skip
    empty |= {key for key, is_open in others.items() if is_open}

    def is_known(row: PeerKey) -> bool:
        words = row.key.split(".")
        inside = {".".join(words[:end]) for end in range(1, len(words))} | {f"*.{word}" for word in words[:-1]}
        pattern = re.escape(row.key).replace(r"\*\*", r".+").replace("<role>", r"[^.]+").replace("<name>", r"[^.]+")
        return (row.key in keys | parents or f"*.{words[-1]}" in keys or not empty.isdisjoint(inside)
                or any(re.fullmatch(pattern, key) for key in keys))  # fmt: skip

    return [f"{system}: {row.key}" for system, row in _rows(name) if not is_earlier(system, row) and not is_known(row)]


def _rows(name: str) -> Iterator[tuple[str, PeerKey]]:
    for system in peers.SYSTEMS[name]:
        yield from ((system, row) for row in systems()[system].rows)


def _other_names(name: str, folder: Path) -> Iterator[tuple[str, bool]]:
    """Yield names that a file may have besides, and whether any key may stand below; `*.word`: in any section."""
    if name == "trl":
        for file in (folder / "trl").rglob("*.py"):
            if file.name.endswith(("_config.py", "_trainer.py", "utils.py")):
                yield from _declared(file)
        yield "env", True  # of a file for --config: variables of the environment
    elif name == "openrlhf":  # of deepspeed and torchrun, which start it
        yield from ((word, False) for word in ("num_gpus", "num_nodes", "nproc_per_node", "nnodes"))
    elif name == "verl":
        config = folder / "verl" / "trainer" / "config"
        for file in config.glob("*.yaml"):
            leaves = leaves_of(yaml.safe_load(file.read_text("utf-8")))
            yield from ((key, value in (None, {})) for key, value in leaves)
        for file in (folder / "verl").rglob("*.py"):
            words = re.findall(r"""\.get\(["'](\w+)["'](, (?:\{\}|None)\))?""", file.read_text("utf-8"))
            yield from ((f"*.{word}", bool(empty)) for word, empty in words)
        for file in [*config.glob("*.py"), *(folder / "verl" / "workers" / "config").rglob("*.py")]:
            yield from ((f"*.{word}", is_open) for word, is_open in _declared(file))
        yield from (("hydra", True), ("defaults", False), ("*._target_", False))


def _declared(file: Path) -> Iterator[tuple[str, bool]]:
    """Yield fields of a file's classes, and what their constructors take."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        for entry in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
                yield entry.target.id, "dict" in ast.unparse(entry.annotation).lower()
            elif isinstance(entry, ast.FunctionDef) and entry.name == "__init__":
                yield from ((argument.arg, argument.arg.endswith("config"))
                            for argument in [*entry.args.args, *entry.args.kwonlyargs])  # fmt: skip


def differing(name: str, now: Mapping[str, Any]) -> list[str]:
    """Return keys whose type or default isn't the one in our table, or that it lacks or has too many, and such rows."""
    typed = name != "verl"
    before = dict(leaves_of(peers.table(name)))
    after = dict(leaves_of(_short(now, typed)))
    lines = [f"{key}: {before.get(key, 'not in the table')!r}, now {after.get(key, 'gone')!r}"
             for key in {**before, **after}
             if repr(before.get(key, NO_DEFAULT)) != repr(after.get(key, NO_DEFAULT))]  # fmt: skip
    return lines + [f"{system}: {row.key} = {row.default_text}: the table says it" for system, row in _rows(name)
                    if row.default is not NO_DEFAULT and peers.table(system)]  # fmt: skip


def main() -> int:
    """Compare, or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true", help="write the tables anew")
    parser.add_argument("--list", action="store_true", help="name what differs, is unknown or has no row")
    options = parser.parse_args()
    lines, named, wrong = [], [], Counter[str]()
    for name in READERS:
        now = table(name, options.folder)
        if options.write:
            (TABLES / f"{name}.json").write_text(written(packed(now, name != "verl")), "utf-8")
            peers.table.cache_clear()
        other, unknown = differing(name, now), unknown_rows(name, options.folder)
        wrong["default"] += len(other)
        wrong["name"] += len(unknown)
        named += [f"{name}: {entry}" for entry in other] + [f"no such key: {entry}" for entry in unknown]
        for system, title, keys in sections(name, options.folder):
            missing = without_row(system, keys)
            wrong["row"] += len(missing) if title in MUST else 0
            named += [f"no row: {system}: {title}: {key}" for key in missing]
            share = f"{len(keys) - len(missing)} of {len(keys)}"
            lines.append(f"| {systems()[name].name} {now['release']} | `{title}` | {share} |")
        lines.append(f"| {systems()[name].name} {now['release']} | defaults that differ: {len(other)} "
                     f"| rows of unknown keys: {len(unknown)} |")  # fmt: skip
    sys.stdout.write("\n".join(["| release | keys | with a row |", "|---|---|---|", *lines]) + "\n")
    if options.list:
        sys.stdout.write("\n".join(["", *named]) + "\n")
    return int(wrong.total() > 0)


if __name__ == "__main__":
    sys.exit(main())
