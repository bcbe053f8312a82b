"""Files of other systems, read leniently: YAML with its defaults lists, lists of overrides, shell scripts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll.configs.errors import ConfigError
from roll.configs.parsing.roll_names import PRESETS
from roll.configs.parsing.yaml_files import read_yaml
from roll.utils.shipped import shipped
from roll.workbench.migrate import openrlhf_flags
from roll.workbench.migrate.draft import leaves_of
from roll.workbench.migrate.overrides import Unexpanded, read_overrides
from roll.workbench.migrate.references import Filler
from roll.workbench.migrate.shell_words import Word, read_script

_SHELL = (".sh", ".bash", ".zsh", ".slurm", ".sbatch")
_JOB = re.compile(r"(?:^|[./])(main_\w+|fsdp_sft_trainer|sft_trainer\w*|main)(?:\.py)?$")
_IN_A_LIST = re.compile(r"[+~]*[\w-]+\.[\w.-]+=|[+~]+[\w.-]+(=|$)")
"""An override among other words: it has a dot in its key, or a sign in front of it."""
_LONGEST = 4 * 2**20
_INCLUDES = 50
"""Files that a file may include, and those that they do."""


@dataclass
class Source:
    """What a file says."""

    tree: dict[str, Any]
    """Its keys, nested, with references filled in."""
    job: str = ""
    """Name of the module that a script starts."""
    variables: set[str] = field(default_factory=set)
    """Names at the top level that something refers to."""
    sections: dict[str, str] = field(default_factory=dict)
    """References that stand for a whole section, by the key that has them."""
    included: dict[str, Any] = field(default_factory=dict)
    """Keys of included files, before the file's own."""
    deleted: list[str] = field(default_factory=list)
    conflicts: list[tuple[str, Any]] = field(default_factory=list)
    choices: list[tuple[str, Any]] = field(default_factory=list)
    """Hydra's, of files of defaults."""
    notes: list[str] = field(default_factory=list)
    presets: list[str] = field(default_factory=list)
    """Defaults that presets of this package stand for."""
    absent: list[str] = field(default_factory=list)
    """Defaults that there is no file for."""


def read_source(file: Path) -> Source:
    """Return what a file says.

    Raises `ValueError` for one that can't be read, that is neither of the three, or that grows without end.
    """
    text = _text(file)
    first = text.split("\n", 1)[0]
    if file.suffix in _SHELL or first.startswith("#!") or re.search(r"-m\s+\S*verl\S*|openrlhf\.cli\.", text):
        return _from_shell(text, file)
    if file.suffix in (".yaml", ".yml", ".json"):
        return _from_yaml(file)
    try:
        return _from_yaml(file)
    except ConfigError:
        return _from_shell(text, file)


def _text(file: Path) -> str:
    try:
        if file.stat().st_size > _LONGEST:
            raise ValueError(f"{file} is larger than {_LONGEST >> 20} MiB, and no configuration is")
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} isn't UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise ValueError(f"{file} can't be read: {error.strerror}") from None


def _from_shell(text: str, file: Path) -> Source:
    try:
        script = read_script(text)
    except ValueError as error:
        raise ValueError(f"{file} can't be read as a shell script: {error}") from None
    if flags := openrlhf_flags.read_commands(script.commands):
        return Source(job=flags[0], tree=flags[1], notes=flags[2])
    jobs = [(command, at) for command in script.commands if (at := _job_at(command)) is not None]
    if jobs:
        command, at = jobs[0]
        words = command[at + 1 :]
        found = _source(read_overrides(words))
        found.job = command[at].text
        if "sft_trainer" in found.job:
            _launched(command[:at], found)
        found.notes += [f"line {other[place].line}: {other[place].text} is another job; move it into a file of its own"
                        for other, place in jobs[1:]]  # fmt: skip
        named = [word.text for word in words if "config" in word.text and word.text.startswith("--")]
        found.notes += [f"{option}: what that file says isn't in here" for option in named if "megatron" not in option]
        if any("megatron" in word.text for word in words if "config" in word.text or word.text.endswith(".yaml")):
            found.job += " megatron"
    else:
        every = [word for command in script.commands for word in command]
        words = [word for word in every if _IN_A_LIST.match(word.text)]
        found = _source(read_overrides(words))
    if not found.tree and not found.deleted:
        raise ValueError(
            f"{file} has no key=value that could be translated; it should start verl (python3 -m verl.trainer.main_ppo "
            "key=value ...), be a list of such overrides, or a YAML file"
        )
    return found


def _launched(words: list[Word], found: Source) -> None:
    """Enter the devices that torchrun starts: verl's fine-tuning takes them from there."""
    for at, word in enumerate(words):
        flag, equals, value = word.text.lstrip("-").replace("-", "_").partition("=")
        key = {"nproc_per_node": "n_gpus_per_node", "nnodes": "nnodes"}.get(flag)
        if key is None or not word.text.startswith("--"):
            continue
        given = word if equals else words[at + 1] if at + 1 < len(words) else word
        text = value if equals else given.text
        if given.unexpanded or not text.isdecimal():
            found.notes.append(
                f"{word.text}: torchrun's number isn't known here; set num_gpus_per_node or num_nodes, "
                "actor_train.device_mapping and gradient_accumulation_steps for yours"
            )
        elif isinstance(trainer := found.tree.setdefault("trainer", {}), dict):
            trainer[key] = int(text)


def _source(overrides: Any) -> Source:
    filler = Filler(overrides.tree, {})
    tree = filler.fill(overrides.tree)
    return Source(tree=tree, sections=filler.sections, deleted=overrides.deleted, conflicts=overrides.conflicts,
                  choices=overrides.choices)  # fmt: skip


def _job_at(command: list[Word]) -> int | None:
    """Place of the word that names the job, in a command that starts one of verl."""
    texts = [word.text for word in command]
    for at, text in enumerate(texts):
        after = at > 0 and texts[at - 1] == "-m"
        script = text.endswith(".py") and "=" not in text
        if (after or script) and _JOB.search(text):
            return at
    return None


def _from_yaml(file: Path) -> Source:
    own = _plain(read_yaml(file))
    found = Source(tree={})
    defaults = own.get("defaults")
    presets: dict[str, Any] = {}
    if isinstance(defaults, list):
        budget = [_INCLUDES]
        for entry in defaults:
            _include(entry, file, found, presets, (file.resolve(),), budget)
    tree = _merged(found.included, own)
    for name in PRESETS:
        if name not in presets and name not in tree and f"${{{name}}}" in str(own):
            _preset(name, presets)
    filler = Filler(tree, presets)
    found.tree = filler.fill(tree)
    found.variables, found.sections = filler.used, filler.sections
    return found


def _include(
    entry: Any, file: Path, found: Source, presets: dict[str, Any], above: tuple[Path, ...], budget: list[int]
) -> None:
    """Add what one entry of a defaults list stands for."""
    names = list(entry.items()) if isinstance(entry, Mapping) else [("", entry)]
    for group, name in names:
        if not isinstance(name, str) or name == "_self_":
            continue
        path = name.partition("@")[0].removesuffix(".yaml")
        given = f"{group}: {name}" if group else name
        group = str(group).partition("@")[0].removeprefix("override ").strip()
        stem = Path(path).name
        budget[0] -= 1
        if budget[0] < 0:
            raise ValueError(f"{file}: its defaults lead to more than {_INCLUDES} files")
        try:
            target = (file.parent / group / f"{path}.yaml").resolve()
            there = target.is_file()
        except (OSError, ValueError) as error:  # a NUL, a name that is too long
            raise ValueError(f"{file}: its defaults name {given[:60]!r}, which can be no file: {error!s:.60}") from None
        if target in above:
            raise ValueError(f"{file}: its defaults go round in a circle: {given} leads back to {target.name}")
        if there:
            inside = _plain(read_yaml(target))
            listed = inside.pop("defaults", None)
            for below in listed if isinstance(listed, list) else ():
                _include(below, target, found, presets, (*above, target), budget)
            found.included = _merged(found.included, inside)
        elif stem in PRESETS:
            _preset(stem, presets)
            found.presets.append(given)
        else:
            found.absent.append(given)


def _preset(name: str, presets: dict[str, Any]) -> None:
    """Add what a preset of this package says, under their name as well."""
    inside = _plain(read_yaml(shipped("configs") / f"{PRESETS[name]}.yaml"))
    presets.update(inside)
    if PRESETS[name] in inside:
        presets[name] = inside[PRESETS[name]]


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(first)
    for key, value in second.items():
        before = result.get(key)
        result[key] = _merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return result


def _plain(node: Any) -> Any:
    """With keys as text: `on:` is true in YAML, `0:` a number."""
    if isinstance(node, Mapping):
        return {str(key): _plain(value) for key, value in node.items()}
    return [_plain(value) for value in node] if isinstance(node, list) else node


def unexpanded_in(value: Any) -> Unexpanded | None:
    """Return the first value inside that would have to be run or worked out."""
    if isinstance(value, Unexpanded):
        return value
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return next((found for entry in inside if (found := unexpanded_in(entry))), None)


def leaf_count(tree: Mapping[str, Any]) -> int:
    """Return how many keys have a value."""
    return sum(1 for _ in leaves_of(tree))
