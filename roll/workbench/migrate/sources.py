"""Files of other systems, read leniently: YAML with its defaults lists, lists of overrides, launch scripts."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll.configs.errors import ConfigError
from roll.configs.parsing.roll_presets import PRESETS
from roll.configs.parsing.yaml_files import read_yaml
from roll.utils.shipped import shipped
from roll.workbench.migrate import openrlhf_flags
from roll.workbench.migrate.overrides import Filler, Overrides, Unexpanded, merged, read_flags, read_overrides
from roll.workbench.migrate.peers import table
from roll.workbench.migrate.shell_expansions import Script, Word
from roll.workbench.migrate.shell_words import read_script

_SHELL = (".sh", ".bash", ".zsh", ".slurm", ".sbatch")
_VERL = re.compile(r"(?:^|[./])(main_\w+|fsdp_sft_trainer|sft_trainer\w*|main)(?:\.py)?$")
_VERLS_OWN = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine", "evaluation", "generation")
"""Files of configuration that come with verl: their keys are its defaults."""
_TRL = ("grpo", "rloo", "dpo", "kto", "sft", "reward", "gkd", "online_dpo", "distillation")
_ROLL = re.compile(r"start_\w*pipeline\.py$")
_STARTS = re.compile(r"-m\s+\S*(verl|openrlhf|trl)\b|\btrl\s+(" + "|".join(_TRL) + r")\b|\.py\s+(\S+=|--)")
_IN_A_LIST = re.compile(r"[+~]*[\w-]+\.[\w.-]+=|[+~]+[\w.-]+(=|$)")
"""An override among other words: it has a dot in its key, or a sign in front of it."""
_LEFT_OVER = re.compile(rf"--[a-z]|{_IN_A_LIST.pattern}")
_LISTED = re.compile(r"-\s+['\"]?(\+?\+?[A-Za-z_][\w.@/-]*=|~\w)")
_LAUNCH_MODULES = ("torch.distributed.", "accelerate.", "deepspeed.")
_LAUNCHERS = {"nproc_per_node": "each", "nnodes": "machines", "num_processes": "all", "num_machines": "machines",
              "num_gpus": "each", "num_nodes": "machines"}  # fmt: skip
"""Options of torchrun, accelerate and deepspeed that say how many processes there are."""
_LONGEST = 4 * 2**20
_INCLUDES = 50
"""Files that a file may include, and those that they do."""


@dataclass
class PeerFile:
    """A configuration of another system, as it was read."""

    tree: dict[str, Any]
    """Its keys, nested, with references filled in."""
    job: str = ""
    """What a script starts: verl's module, OpenRLHF's script, the trainer of TRL's command or the name of a script."""
    system: str = ""
    """Whose job that is."""
    variables: set[str] = field(default_factory=set)
    """Keys that something refers to."""
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
    """Files that it reads and that aren't there."""
    processes: dict[str, int] = field(default_factory=dict)
    """Processes that torchrun, accelerate or deepspeed start: `each` machine, `machines`, or `all` of them."""


def read_source(file: Path) -> PeerFile:
    """Return what a file says.

    Raises `ValueError` for one that can't be read, that is neither of the three, or that grows without end.
    """
    text = _text(file)
    is_yaml = file.suffix in (".yaml", ".yml", ".json")
    if file.suffix in _SHELL or text.startswith("#!") or (not is_yaml and _STARTS.search(text)):
        return _from_shell(text, file)
    try:
        return _from_yaml(file)
    except ConfigError as error:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if all(_LISTED.match(line) for line in lines):  # Hydra's overrides.yaml
            return _from_shell("\n".join(line[1:] for line in lines), file)
        if file.suffix == ".json" and "\t" in text:  # YAML has no tabs
            with contextlib.suppress(ValueError, RecursionError):
                if isinstance(tree := json.loads(text), dict):
                    return PeerFile(tree=_plain(tree))
        if is_yaml:
            raise error
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


@dataclass
class _Job:
    """A command that starts a trainer."""

    system: str
    name: str
    line: int
    before: list[Word]
    words: list[Word]


def _from_shell(text: str, file: Path) -> PeerFile:
    try:
        script = read_script(text)
        for inside in [*(text for _, text, _ in script.documents), *_texts_inside(script)]:
            if _STARTS.search(inside):
                with contextlib.suppress(ValueError):  # a program in another language
                    read_script(inside, script)
    except ValueError as error:
        raise ValueError(f"{file} can't be read as a shell script: {error}") from None
    script.notes += [note for name, note in script.conditions.items() if name in script.used]
    if flags := openrlhf_flags.read_commands(script.commands):
        return PeerFile(system="openrlhf", job=flags[0], tree=flags[1], notes=[*flags[2], *script.notes])
    jobs = [job for command in script.commands if (job := _job(command)) is not None]
    # A script of nobody's is TRL's way to start a trainer of one's own, or prepares the data.
    jobs = [job for job in jobs if job.system] or [job for job in jobs if _flags_known(job)]
    if jobs:
        source = _of_job(jobs[0], file, script)
        source.notes += [f"line {job.line}: {job.name} is another job; move it into a file of its own"
                        for job in jobs[1:]]  # fmt: skip
        script.notes += [f"line {words[0].line}: {words[0].text[:60]} isn't of the command above it, which ends before "
                         "that, at a comment, an empty line or a blank behind its \\" for words in script.commands
                         if words[0].line > jobs[0].line and _LEFT_OVER.match(words[0].text)]  # fmt: skip
    else:
        words = [word for command in script.commands for word in command if _IN_A_LIST.match(word.text)]
        source = _source(read_overrides(words), {})
    source.notes += script.notes
    if not source.tree and not source.deleted:
        raise ValueError(
            f"{file} has no key=value that could be translated; it should start verl (python3 -m verl.trainer.main_ppo "
            "key=value ...), TRL (trl grpo --key value ...) or OpenRLHF (python3 -m openrlhf.cli.train_ppo_ray --key "
            f"value ...), be a list of such overrides, or a YAML file"
            f"{''.join(f'; {note}' for note in source.notes[:3])}"
        )
    return source


def _texts_inside(script: Script) -> Iterable[str]:
    """Yield commands that stand in quotes: `bash -c "..."`, `srun`, `ssh`."""
    for command in list(script.commands):
        if _job(command) is None:
            yield from (word.text for word in command if " " in word.text)


def _job(command: Sequence[Word]) -> _Job | None:
    """Return the trainer that a command starts; of a script of nobody's that one, with an empty `system`."""
    texts = [word.text for word in command]
    unknown = None
    last_flag = max((at for at, text in enumerate(texts) if text.startswith("--")), default=-1)
    for at, text in enumerate(texts):
        module = at > 0 and texts[at - 1] in ("-m", "--module")
        if text.rpartition("/")[2] == "trl" and at + 1 < len(texts) and texts[at + 1] in _TRL and not module:
            return _Job("trl", texts[at + 1], command[at].line, list(command[:at]), list(command[at + 2 :]))
        if "=" in text or not (module or text.endswith(".py")) or text.startswith(_LAUNCH_MODULES):
            continue
        if _ROLL.search(text):
            raise ValueError(f"line {command[at].line}: it starts ROLL with {' '.join(texts[at + 1 :])[:200]}: give "
                             "roll migrate the YAML file that this names")  # fmt: skip
        is_verl = _VERL.search(text) and not text.startswith("trl")
        if not is_verl and (unknown is not None or at > last_flag):
            continue
        before, words = list(command[:at]), list(command[at + 1 :])
        if is_verl:
            return _Job("verl", text, command[at].line, before, words)
        name = text.removesuffix(".py").replace(".", "/").rpartition("/")[2]
        unknown = _Job("trl" if re.search(r"\btrl\b", text) else "", name, command[at].line, before, words)
    return unknown


def _flags_known(job: _Job) -> bool:
    flags = {word.text.lstrip("-").partition("=")[0].replace("-", "_") for word in job.words if word.text[:2] == "--"}
    job.system = "trl" if job.name in _TRL or len(flags & _trl_fields()) > 1 or "config" in flags else ""
    return bool(job.system)


def _of_job(job: _Job, file: Path, script: Script) -> PeerFile:
    """Return what a command says, over the file of configuration that it names."""
    hydra = job.system == "verl"
    options, overrides = _hydra(job.words) if hydra else (read_flags(job.words),) * 2
    name, folder = "", None
    if hydra:
        name, folder = options.tree.pop("config_name", None), options.tree.pop("config_path", None)
        folder = options.tree.pop("config_dir", None) or folder
        name = f"{folder}/{name or 'config'}" if folder else str(name or "")
    elif job.system == "trl":
        name = options.tree.pop("config", "")
        fields = _trl_fields()
        for key in [key for key in options.tree if key not in fields and key[:3] == "no_" and key[3:] in fields]:
            options.tree[key[3:]] = options.tree.pop(key) is not True  # argparse's way to switch one off
    base = _named_file(str(name), file, script) if name and (folder or not hydra) else PeerFile(tree={})
    source = _source(overrides, table("verl")["verl_sft" if "sft" in job.name else "verl"] if hydra else {}, base)
    source.system, source.job = job.system, job.name + (" megatron" if "megatron" in str(name) else "")
    _launched(job.before, source, file.parent)
    for word in overrides.unread:
        what = "isn't set in the script" if word.unexpanded else "is neither key=value nor an option"
        source.notes.append(f"line {word.line}: {word.text[:60]} {what}: what it says isn't in here")
    source.notes += [f"--{option}: an option of Hydra's, not of the training" for option in options.tree] * hydra
    return source


def _hydra(words: list[Word]) -> tuple[Overrides, Overrides]:
    """Return options of Hydra's own, and overrides."""
    options: list[Word] = []
    others: list[Word] = []
    for i, word in enumerate(words):
        follows = i > 0 and words[i - 1].text.startswith("-") and "=" not in words[i - 1].text + word.text
        (options if word.text.startswith("-") or follows else others).append(word)
    return read_flags([word for word in options if word.text not in ("-m", "-h")]), read_overrides(others)


def _trl_fields() -> set[str]:
    return {key for name, section in table("trl").items() if name != "release" for key in section}


def _named_file(name: str, file: Path, script: Script) -> PeerFile:
    """Return the contents of the configuration file that a command names: one that the script writes, or one here."""
    for target, _, text in script.documents:
        if target and Path(target).name in (Path(name).name, f"{Path(name).name}.yaml"):
            with tempfile.TemporaryDirectory() as folder:
                (inside := Path(folder) / f"{Path(name).name}").write_text(text.text, "utf-8")
                source = _from_yaml(inside)
            source.tree = _stopped(source.tree, text.unexpanded)
            return source
    for path in [folder / (name + suffix) for folder in (file.parent, Path()) for suffix in ("", ".yaml", ".yml")]:
        there = False
        with contextlib.suppress(OSError, ValueError):  # a name that can be no file
            there = path.is_file()
        if there:
            return _from_yaml(path)
    return PeerFile(tree={}, absent=[] if Path(name).stem in _VERLS_OWN else [name])


def _stopped(node: Any, parts: Sequence[str]) -> Any:
    """Return overrides with `Unexpanded` for texts with parts that the shell would have filled in."""
    if isinstance(node, Mapping):
        return {key: _stopped(value, parts) for key, value in node.items()}
    if isinstance(node, list):
        return [_stopped(value, parts) for value in node]
    inside = tuple(part for part in parts if part.partition(",")[0] in node) if isinstance(node, str) else ()
    return Unexpanded(node, inside) if inside else node


def _launched(words: list[Word], source: PeerFile, folder: Path) -> None:
    """Enter the processes that torchrun, accelerate or deepspeed start, as their options or accelerate's file say."""
    options = read_flags(words).tree
    if isinstance(name := options.get("config_file"), str):
        told = next((path for path in (folder / name, Path(name)) if path.is_file()), None)
        if told is None:
            source.notes.append(f"--config_file={name}: accelerate's settings; there is no such file here, so what it "
                                "says of processes, DeepSpeed or FSDP isn't in here")  # fmt: skip
        else:
            options = {**_from_yaml(told).tree, **options}
    for flag, name in _LAUNCHERS.items():
        value = options.get(flag)
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, int) and not isinstance(value, bool):
            source.processes[name] = value
        elif value is not None:
            source.notes.append(
                f"--{flag}={value}: the number of processes isn't known here; set num_gpus_per_node or num_nodes, "
                "actor_train.device_mapping and gradient_accumulation_steps for yours; with torchrun each is a device"
            )
    each = source.processes.get("each", source.processes.get("all", 0) // source.processes.get("machines", 1))
    if source.system == "verl" and "sft_trainer" in source.job and source.processes:
        trainer = source.tree.setdefault("trainer", {})
        if isinstance(trainer, dict):
            trainer |= {"n_gpus_per_node": each} if each else {}
            trainer |= {"nnodes": source.processes["machines"]} if "machines" in source.processes else {}


def _source(overrides: Overrides, defaults: Mapping[str, Any], base: PeerFile | None = None) -> PeerFile:
    source = base or PeerFile(tree={})
    filler = Filler(merged(source.tree, overrides.tree), defaults)
    source.tree = filler.fill(merged(source.tree, overrides.tree))
    source.sections |= filler.sections
    source.deleted, source.conflicts, source.choices = overrides.deleted, overrides.conflicts, overrides.choices
    return source


def _from_yaml(file: Path) -> PeerFile:
    own = _plain(read_yaml(file))
    if own.keys() == {"hydra"}:
        raise ValueError(f"{file} has Hydra's own settings: give roll migrate the config.yaml beside it")
    source = PeerFile(tree={})
    defaults = own.get("defaults")
    presets: dict[str, Any] = {}
    if isinstance(defaults, list):
        budget = [_INCLUDES]
        for entry in defaults:
            _include(entry, file, source, presets, (file.resolve(),), budget)
    tree = merged(source.included, own)
    for name in PRESETS:
        if name not in presets and name not in tree and f"${{{name}}}" in str(own):
            _preset(name, presets)
    known = table("verl")["verl"] if "actor_rollout_ref" in tree else {}
    filler = Filler(tree, merged(known, presets))
    source.tree = filler.fill(tree)
    source.variables, source.sections = filler.used, filler.sections
    return source


def _include(
    entry: Any, file: Path, source: PeerFile, presets: dict[str, Any], above: tuple[Path, ...], budget: list[int]
) -> None:
    """Add what one entry of a defaults list stands for."""
    names = list(entry.items()) if isinstance(entry, Mapping) else [("", entry)]
    for group, name in names:
        if not isinstance(name, str) or name == "_self_":
            continue
        path = name.partition("@")[0].removesuffix(".yaml")
        entry_name = f"{group}: {name}" if group else name
        group = str(group).partition("@")[0].removeprefix("override ").strip()
        stem = Path(path).name
        budget[0] -= 1
        if budget[0] < 0:
            raise ValueError(f"{file}: its defaults lead to more than {_INCLUDES} files")
        try:
            target = (file.parent / group / f"{path}.yaml").resolve()
            there = target.is_file()
        except (OSError, ValueError) as error:  # a NUL, a name that is too long
            raise ValueError(
                f"{file}: its defaults name {entry_name[:60]!r}, which can be no file: {error!s:.60}"
            ) from None
        if target in above:
            raise ValueError(f"{file}: its defaults go round in a circle: {entry_name} leads back to {target.name}")
        if there:
            inside = _plain(read_yaml(target))
            listed = inside.pop("defaults", None)
            for below in listed if isinstance(listed, list) else ():
                _include(below, target, source, presets, (*above, target), budget)
            source.included = merged(source.included, inside)
        elif stem in PRESETS:
            _preset(stem, presets)
            source.presets.append(entry_name)
        elif stem not in _VERLS_OWN:
            source.absent.append(entry_name)


def _preset(name: str, presets: dict[str, Any]) -> None:
    """Add what a preset of this package says, under their name as well."""
    inside = _plain(read_yaml(shipped("configs") / f"{PRESETS[name]}.yaml"))
    presets.update(inside)
    if PRESETS[name] in inside:
        presets[name] = inside[PRESETS[name]]


def _plain(node: Any) -> Any:
    """Return the value with keys as text: `on:` is true in YAML, `0:` a number."""
    if isinstance(node, Mapping):
        return {str(key): _plain(value) for key, value in node.items()}
    return [_plain(value) for value in node] if isinstance(node, list) else node
