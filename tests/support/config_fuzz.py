"""Broken variants of every shipped YAML file, drawn by a seed, and what a check of one must do."""

from __future__ import annotations

import copy
import os
import random
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from roll.configs.checks.machine import Machine
from roll.configs.full_check import load_checked

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
    "odd keys": {1: 2, None: 3, True: 4},
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
    text: str


def shipped(folder: Path) -> list[Path]:
    """Copy every shipped YAML file to `folder`, with the places between them; return the examples."""
    for home in ("examples", "configs"):
        for file in sorted((REPOSITORY / home).rglob("*.yaml")):
            copied = folder / file.relative_to(REPOSITORY)
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_bytes(file.read_bytes())
    return sorted((folder / "examples").rglob("*.yaml"))


def cases(count: int, seed: int, files: Sequence[Path]) -> Iterator[Case]:
    """Yield `count` cases; one in four has two faults."""
    rng = random.Random(seed)
    trees = {file: yaml.safe_load(file.read_text(encoding="utf-8")) for file in files}
    for _ in range(count):
        file = rng.choice(files)
        tree, done = copy.deepcopy(trees[file]), []
        for _ in range(rng.choice((1, 1, 1, 2))):
            done.append(_break(rng, tree))
        text = yaml.dump(tree, sort_keys=False)
        for name, written in _TEXTS.items():
            text = text.replace(name, written)
        yield Case(file, " and ".join(done), text)


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
        home[rng.choice(("surprise", "name", "size", "hydra", "defaults", "", "a.b", "a[0]"))] = rng.choice((1, {}, "x"))
    else:
        word = rng.choice(sorted(VALUES))
        home[key], way = copy.deepcopy(VALUES[word]), word
    return f"{name}: {way}"


def _places(tree: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield (*path, key), tree, key
        yield from _places(tree[key], (*path, key))


@contextmanager
def beside(file: Path, text: str) -> Iterator[Path]:
    """A file of this text next to `file`, whose `defaults` are relative to it."""
    variant = file.with_name(f"fuzz_{os.getpid()}.yaml")
    variant.write_text(text, encoding="utf-8")
    try:
        yield variant
    finally:
        variant.unlink()


def verdict(case: Case) -> str:
    """Return what is wrong with the check of a case; empty where it ends in a plan or in a clear error."""
    from roll.envs.env_registry import env_violations

    start = time.process_time()
    with beside(case.file, case.text) as file:
        try:
            config = load_checked(file, further=[env_violations], machine=Machine())
            said = f"{config.batch.explain()}\n{config.placement.explain()}\n{config.explain_results()}"
            from roll.configs.rules.validate import warnings_of

            warnings_of(config)
        except ValueError as error:
            said = str(error)
            name = type(error).__name__
            if name not in ("ConfigError", "EnvLoadError", "ValueError") or (name == "ValueError" and _is_raw(error)):
                return f"{case.file.name}: {case.what}: {''.join(traceback.format_exception(error))[-1500:]}"
        except Exception as error:  # noqa: BLE001 - what the campaign looks for
            return f"{case.file.name}: {case.what}: {''.join(traceback.format_exception(error))[-1500:]}"
    seconds = time.process_time() - start
    if seconds > PATIENCE:
        return f"{case.file.name}: {case.what}: it took {seconds:.1f} s"
    return "" if said.strip() else f"{case.file.name}: {case.what}: nothing was said"


def _is_raw(error: BaseException) -> bool:
    """Whether an error comes from Python or another package, and so isn't about a configuration."""
    frames = traceback.extract_tb(error.__traceback__)
    return "/roll/" not in frames[-1].filename
