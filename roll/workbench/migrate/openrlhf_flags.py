"""Flags of OpenRLHF's scripts: found in a launch script, by their names of today."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from roll.workbench.migrate import peers
from roll.workbench.migrate.overrides import Unexpanded, leaves_of, parsed
from roll.workbench.migrate.report import HIDDEN
from roll.workbench.migrate.shell_expansions import Word
from roll.workbench.migrate.shell_words import read_script
from roll.workbench.migrate.table import systems

SCRIPTS = {"train_sft": "sft", "train_dpo": "dpo", "train_rm": "reward_model", "train_ppo_ray": "rlvr"}
"""Their scripts, with the pipelines that they become."""
_SCRIPT = re.compile(r"(?:.*[./])?(train_(?:sft|dpo|rm|ppo|ppo_ray|kto|kd|prm|opd))(?:\.py)?")
_LAUNCHERS = {"--num_gpus": "num_gpus", "--nproc_per_node": "num_gpus", "--nproc-per-node": "num_gpus",
              "--num_nodes": "num_nodes", "--nnodes": "num_nodes"}  # fmt: skip
_OLD = "flags by their names before 0.10"
_FLAG = re.compile(r"-[^\d.]")
"""How a word begins that is no value: a negative number is one."""


@cache
def kinds_of(script: str) -> dict[str, tuple[str, Any]]:
    """Return the type and default of each flag of a script."""
    return peers.jobs("openrlhf")[script]


def read_commands(commands: Sequence[list[Word]]) -> tuple[str, dict[str, Any], list[str]] | None:
    """Return the script that the first of these commands starts, its flags nested, and what there is to say of them.

    None where none starts one. Raises `ValueError` for a script that this release doesn't have.
    """
    jobs, notes = list(_started(commands)), list[str]()
    if not jobs:
        return None
    command, position, script = jobs[0]
    flags = _launched(command[:position], notes) | _flags(command[position + 1 :], script, notes)
    notes += [f"line {other[0].line}: {name} is another job; move it into a file of its own"
              for other, _, name in jobs[1:]]  # fmt: skip
    # A comment between lines that go on ends the command there: the shell takes what follows for another one.
    notes += [f"line {lost[0].line}: {lost[0].text} isn't part of the command, which has ended above"
              for lost in commands if lost[0].text.startswith("--")]  # fmt: skip
    return script, _nested(flags, notes), notes


def _started(commands: Sequence[list[Word]], depth: int = 0) -> Iterator[tuple[list[Word], int, str]]:
    """Yield commands that start one of the scripts, with position and name; `bash -c "..."` is looked into."""
    for command in commands:
        for position, word in enumerate(command):
            match = _SCRIPT.fullmatch(word.text)
            if match and ("openrlhf" in word.text or (position and command[position - 1].text in ("-m", "--module"))):
                if match[1] not in SCRIPTS:
                    theirs = f"OpenRLHF {peers.release('openrlhf')}"
                    raise ValueError(f"line {word.line}: {theirs} has no {match[1]}; it has {', '.join(SCRIPTS)}")
                yield command, position, match[1]
                break
            if depth < 2 and "openrlhf.cli." in word.text and " " in word.text.strip():
                yield from _started(read_script(word.text).commands, depth + 1)


def _flags(words: list[Word], script: str, notes: list[str]) -> dict[str, Any]:
    """Return what flags say, by their names of today; the last of several counts."""
    flags: dict[str, Any] = {}
    words = [word for word in words if word.text or word.unexpanded]
    while words:
        word = words.pop(0)
        if not word.text.startswith("--"):
            unknown = f"flags in {word.text} aren't known here: {', '.join(word.unexpanded)}"
            notes.append(f"line {word.line}: {unknown if word.unexpanded else f'{word.text[:60]} belongs to no flag'}")
            continue
        name, equals, rest = word.text[2:].partition("=")
        names = _today(name, script, notes)
        kind = kinds_of(script).get(names[0], ["?"])[0]
        if kind == "?" and any(names[0] in kinds_of(other) for other in SCRIPTS):
            notes.append(f"line {word.line}: --{name} is a flag of another script, {script} has none of this name")
        values, many = [Word(rest, word.unexpanded, word.line)] if equals else [], kind.startswith(("list", "?"))
        while not equals and words and kind != "bool" and (many or not values) and not _FLAG.match(words[0].text):
            values.append(words.pop(0))
        if not values and kind in ("int", "float", "str"):
            notes.append(f"line {word.line}: --{name} has no value")
        flags |= {each: HIDDEN if each == "logger.wandb.key" else _typed(kind, values) for each in names}
    return flags


def _launched(words: list[Word], notes: list[str]) -> dict[str, Any]:
    """Return devices and machines that deepspeed or torchrun are told."""
    flags: dict[str, Any] = {}
    for word, after in zip(words, [*words[1:], Word()], strict=True):
        name, equals, value = word.text.partition("=")
        value = value if equals else after.text
        if name in _LAUNCHERS and value.isdecimal():
            flags[_LAUNCHERS[name]] = int(value)
        elif name == "--include" and value.count(":") == 1 and "@" not in value:
            flags["num_gpus"] = value.count(",") + 1
        elif name in (*_LAUNCHERS, "--include", "--hostfile"):
            notes.append(f"{name} {value}: how many devices? Write num_gpus_per_node and num_nodes")
    return flags


def _today(name: str, script: str, notes: list[str]) -> list[str]:
    """Return what a flag is called today; argparse takes the beginning of a name, too."""
    flags, word = kinds_of(script), "weight_decay" if name == "l2" else name
    if name in flags:
        return [name]
    now = [row.now for rows in systems()["openrlhf"].groups.values() for row in rows if row.key == name]
    now = [flag for flag in now if flag in flags] or \
        [flag for flag in flags if flag.rpartition(".")[2] == word and not flag.startswith("eval.")]  # fmt: skip
    short = [flag for flag in flags if flag.startswith(name)]
    if now:
        before = f"{notes.pop()}, " if notes and notes[-1].startswith(_OLD) else f"{_OLD}: "
        notes.append(f"{before}--{name} is {' and '.join(now)}")
    elif len(short) == 1:
        notes.append(f"--{name} is short for --{short[0]}")
        return short
    return now or [name]


def _typed(kind: str, words: list[Word]) -> Any:
    if unexpanded := [part for word in words for part in word.unexpanded]:
        return Unexpanded(" ".join(word.text for word in words), tuple(unexpanded))
    if not words:
        return True if kind in ("bool", "?") else [] if kind.startswith("list") else None
    values = [_number(kind.removeprefix("list[").rstrip("]"), word.text) for word in words]
    return values if kind.startswith("list") or len(values) > 1 else values[0]


def _number(kind: str, text: str) -> Any:
    try:
        return {"int": int, "float": float, "str": str}.get(kind, parsed)(text)
    except ValueError:
        return text


def _nested(flags: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return dotted keys as sections."""
    tree: dict[str, Any] = {}
    for key, value in flags.items():
        node: Any = tree
        *sections, word = key.split(".")
        for section in sections:
            node = node.setdefault(section, {}) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node[word] = value
        else:
            tree[key] = value
            notes.append(f"--{key}: a flag with the beginning of its name has a value itself")
    return tree


def read_tree(tree: dict[str, Any], notes: list[str]) -> tuple[str, dict[str, Any]]:
    """Return the script whose flags the keys of a YAML file are, and those flags by their names of today."""
    keys = dict(leaves_of(tree))
    known = {script: sum(_today(key, script, [])[0] in kinds_of(script) for key in keys) for script in SCRIPTS}
    script = max(known, key=lambda name: known[name])
    notes.append(f"taken for flags of {script}, which has {known[script]} of these {len(keys)}")
    return script, _nested({name: value for key, value in keys.items() for name in _today(key, script, notes)}, notes)
