"""Broken variants of every shipped YAML file, drawn by a seed, and what a check of one must do."""

from __future__ import annotations

import copy
import os
import random
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from roll.configs.checks import prerequisites
from roll.configs.checks.machine_checks import Machine
from roll.configs.errors import ConfigError
from roll.configs.full_check import checked, load_checked
from roll.configs.parsing.loader import compose_file, read_tree
from roll.configs.rules.validate import warnings_of
from roll.configs.schema.run_config import RunConfig
from roll.envs.env_registry import env_violations

REPOSITORY = Path(__file__).parents[2]
PATIENCE = 5.0
"""CPU seconds for one check."""


def _deep(levels: int, *, mapping: bool) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value} if mapping else [value]
    return value


VALUES: dict[str, Any] = {
    "null": None,
    "nan": float("nan"),
    "infinite": float("inf"),
    "-1": -1,
    "0": 0,
    "10^12": 10**12,
    "10^400": 10**400,
    "1e308": 1e308,
    "0.5": 0.5,
    "true": True,
    "empty text": "",
    "blank": " ",
    "word": "x",
    "number in quotes": "7",
    "long text": "x" * 100_000,
    "long path": "a/" * 50_000,
    "zero byte": "a\0b",
    "dots": "???",
    "own path": "nowhere.py:thing",
    "reference": "${nowhere}",
    "bad reference": "${",
    "list": [1, "a", None],
    "empty list": [],
    "list of sections": [{"name": "x"}, {"name": ["y"]}, {}],
    "section": {"x": {"y": 1}},
    "empty section": {},
    "odd keys": {1: 2, None: 3},
    "name that is none": {"name": [1]},
    "60 lists": _deep(60, mapping=False),
    "60 sections": _deep(60, mapping=True),
    "500 sections": "DEEP SECTIONS",
    "10,000 lists": "DEEP LISTS",
}
"""What takes the place of a value, besides values from elsewhere in the file."""
_TEXTS = {"DEEP SECTIONS": "{a: " * 500 + "1" + "}" * 500, "DEEP LISTS": "[" * 10_000 + "]" * 10_000}
"""What yaml can't write itself."""


@dataclass(frozen=True)
class Case:
    """One file with one thing or two broken."""

    file: Path
    what: str
    tree: dict[Any, Any]
    composed: bool
    """Whether `tree` is what the file says once Hydra has composed it, which is most of a check's time."""


def shipped(folder: Path) -> list[Path]:
    """Copy every shipped YAML file to `folder`, with the places between them; return the examples."""
    for home in ("examples", "configs"):
        for file in sorted((REPOSITORY / home).rglob("*.yaml")):
            copied = folder / file.relative_to(REPOSITORY)
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_bytes(file.read_bytes())
    return sorted((folder / "examples").rglob("*.yaml"))


def cases(count: int, seed: int, files: Sequence[Path], *, composed: bool) -> Iterator[Case]:
    """Yield `count` cases; one in four has two faults."""
    rng = random.Random(seed)
    trees: dict[Path, dict[Any, Any]] = {}
    for _ in range(count):
        file = rng.choice(files)
        if file not in trees:
            trees[file] = _composed(file) if composed else yaml.safe_load(file.read_text(encoding="utf-8"))
        tree, done = copy.deepcopy(trees[file]), []
        for _ in range(rng.choice((1, 1, 1, 2))):
            done.append(_break(rng, tree))
        yield Case(file, " and ".join(done), tree, composed)


def _composed(file: Path) -> dict[str, Any]:
    try:
        return compose_file(file)[0]
    except ConfigError as error:  # for the variables that a file leaves to its user
        return compose_file(file, [f"{violation.path}=rows.jsonl" for violation in error.violations])[0]


def _break(rng: random.Random, tree: dict[Any, Any]) -> str:
    places = list(_places(tree, ()))
    way = rng.choice(("drop", "misspell", "value", "value", "value", "value", "borrow", "unknown"))
    path, home, key = rng.choice(places)
    name = ".".join(map(str, path))
    if way == "drop":
        del home[key]
    elif way == "misspell" and isinstance(home, dict):
        letters = list(str(key)) or ["x"]
        i = rng.randrange(len(letters))
        letters[i] = rng.choice("abcdefghijklmnopqrstuvwxyz_.- ")
        home["".join(letters)] = home.pop(key)
    elif way == "borrow":
        _, other, there = rng.choice(places)
        home[key] = copy.deepcopy(other[there])
    elif way == "unknown" and isinstance(home, dict):
        home[rng.choice(("surprise", "name", "size", "hydra", "defaults", "", "a.b", "a[0]"))] = rng.choice(
            (1, {}, "x")
        )
    else:
        word = rng.choice(sorted(VALUES))
        home[key], way = copy.deepcopy(VALUES[word]), word
    return f"{name}: {way}"


def _places(tree: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield (*path, key), tree, key
        yield from _places(tree[key], (*path, key))


def _any_model(name: str) -> str:
    """Say of every model that the hub has it: there is no network in tests."""
    del name
    return ""


def _checked(case: Case) -> RunConfig:
    prerequisites.hub_problem = _any_model
    further, machine = [env_violations], Machine()
    if case.composed:
        return checked(read_tree(case.tree), extra=further, machine=machine)
    text = yaml.dump(case.tree, sort_keys=False)
    for name, written in _TEXTS.items():
        text = text.replace(name, written)
    variant = case.file.with_name(f"broken_{os.getpid()}.yaml")  # beside it: `defaults` are relative to the file
    variant.write_text(text, encoding="utf-8")
    try:
        return load_checked(variant, extra=further, machine=machine)
    finally:
        variant.unlink()


def verdict(case: Case) -> str:
    """Return what is wrong with the check of a case; empty where it ends in a plan or in a clear error."""
    start = time.process_time()
    about = f"{case.file.stem}: {case.what}: "
    try:
        config = _checked(case)
        said = f"{config.batch.explain()}\n{config.placement.explain()}\n{config.explain_results()}"
        warnings_of(config)
    except ConfigError as error:
        said = str(error)
    except Exception as error:  # noqa: BLE001 - what is looked for
        return about + "".join(traceback.format_exception(error))[-1500:]
    seconds = time.process_time() - start
    if seconds > PATIENCE:
        return f"{about}it took {seconds:.1f} s"
    return "" if said.strip() else f"{about}nothing was said"
