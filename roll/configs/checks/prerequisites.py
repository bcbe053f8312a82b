"""Checks against the world outside: files, folders, models, functions, the machine. Imports nothing heavy."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import symtable
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roll.catalog.entries import OWN_PATH
from roll.catalog.pipelines import pipeline_of
from roll.catalog.rewards import REWARDS
from roll.catalog.trackers import TRACKERS, TrackerEntry
from roll.configs.checks.engine_arguments import argument_checks
from roll.configs.checks.machine import MISSING, Machine, machine_checks, this_machine
from roll.configs.checks.model_hub import hub_problem
from roll.configs.checks.sandbox import sandbox_checks
from roll.configs.checks.teacher import teacher_checks
from roll.configs.errors import NO_VALUE, ConfigError, Violation, did_you_mean, nearest, problem
from roll.configs.rules.layout import shape_rules
from roll.configs.rules.reward_model import classifier_checks
from roll.configs.schema.agentic_config import AgenticConfig
from roll.configs.schema.judge_config import JudgeConfig
from roll.configs.schema.model_shape import read_shape
from roll.configs.schema.offline_config import OfflineConfig, OfflineDataArgs
from roll.configs.schema.preference_config import DPOConfig
from roll.configs.schema.reward_config import RewardModelConfig
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.run_config import RunConfig
from roll.configs.schema.worker_config import DataArgs, ProceduralTask
from roll.configs.stand_in import collect
from roll.utils.importing import load_object
from roll.utils.models import SMOLLM2_FOLDER
from roll.utils.readers import read_rows, resolve_sources, scan_rows
from roll.utils.rows import DataError, Row, Source, has_column
from roll.utils.signatures import Signature, call_style_in_source, reward_problems, signature_in_source

_HUB_ID = re.compile(r"^[\w.-]+(/[\w.-]+)?$")


def check_prerequisites(config: RunConfig, machine: Machine | None = None) -> None:
    """Raise `ConfigError` with everything the configuration needs and `machine` (None: this one) doesn't have."""
    violations = prerequisite_violations(config, machine)
    if violations:
        raise ConfigError(violations, "what the configuration refers to")


def prerequisite_violations(
    config: RunConfig, machine: Machine | None = None, *, sound: bool = True
) -> list[Violation]:
    """Everything that is needed and isn't there. Not `sound`: rules are broken, or some values are `STAND_IN`."""
    checks = load_object(pipeline_of(config.pipeline).checks, key="pipeline")
    seen = machine or this_machine()
    return collect([*checks, lambda found: machine_checks(found, seen)], config, sound=sound)


def data_checks(config: RLVRConfig | OfflineConfig) -> Iterator[Violation]:
    """Data files exist, unless the run itself makes them, and have the columns; so do procedural datasets."""
    sections: dict[str, DataArgs | OfflineDataArgs] = {"actor_train.data_args": config.actor_train.data_args}
    if config.validation is not None:
        sections["validation.data_args"] = config.validation.data_args
    for path, data in sections.items():
        for name in data.file_name:
            if config.prepare is not None and not Path(name).expanduser().exists():
                continue
            try:
                for source in resolve_sources(name):
                    columns = data.columns if isinstance(data, DataArgs) else {}
                    if isinstance(config, OfflineConfig) and isinstance(data, OfflineDataArgs):
                        columns = config.columns_of(data)
                    yield from _columns(path, data, columns, source)
            except DataError as error:
                yield problem(f"{path}.file_name", str(error), "check the path, or mend the file", name)
            except (RecursionError, OSError) as error:
                said = "its first row is nested too deeply" if isinstance(error, RecursionError) else error.strerror
                yield problem(f"{path}.file_name", f"{name} can't be read: {said}", "mend the file", name)
        if isinstance(data, DataArgs) and data.procedural:
            yield from _procedural(path, data)
        if isinstance(data, DataArgs) and data.dataset is not None:
            args = (f"{path}.dataset_args", data.dataset_args)
            yield from _named(f"{path}.dataset", data.dataset, "class", args, skip=0)


def _columns(
    path: str, data: DataArgs | OfflineDataArgs, columns: Mapping[str, str], source: Source
) -> Iterator[Violation]:
    """The columns of the first row of a text file; the others, and later rows, are checked when they are read."""
    file = Path(source.location)
    if source.format not in ("jsonl", "csv", "tsv") and not (file.is_file() and file.stat().st_size == 0):
        return
    lenient = isinstance(data, DataArgs) and data.max_bad_rows
    rows = (row for row in scan_rows(source) if isinstance(row, Row)) if lenient else read_rows(source)
    row = next(iter(rows), None)
    if row is None:
        raise DataError(f"{source.location}: no rows")
    for key, column in columns.items():
        if not lenient and not has_column(row.values, column):
            expected = f"a column of {source.location}: {', '.join(row.values)}"
            yield Violation(f"{path}.{key}", expected, f"{path}.{key}=<one of them>", column)
    unnamed = isinstance(data, DataArgs) and data.prompt is None and data.messages is None
    if unnamed and not lenient and not {"prompt", "messages"} & set(row.values):
        expected = f"the column with the prompts, one of {source.location}: {', '.join(row.values)}"
        yield Violation(f"{path}.prompt", expected, f"{path}.prompt=<one of them>", None)


def _procedural(path: str, data: DataArgs) -> Iterator[Violation]:
    spec = importlib.util.find_spec("reasoning_gym")
    if spec is None or spec.origin is None:
        fix = "pip install reasoning-gym, or remove the section"
        yield Violation(f"{path}.procedural", "reasoning-gym, which isn't installed", fix)
        return
    names: dict[str, str] = {}
    for file in Path(spec.origin).parent.rglob("*.py"):
        # Importing the package takes a second; its datasets are named in its sources.
        text = file.read_text(encoding="utf-8")
        found = re.findall(r"""(?:DATASET_NAME\s*=\s*|register_dataset\(\s*)["'](\w+)["']""", text)
        names.update(dict.fromkeys(found, text))
    for i, task in enumerate(data.procedural):
        if task.dataset not in names:
            fix = did_you_mean(task.dataset, names)
            yield Violation(f"{path}.procedural[{i}].dataset", "a dataset of reasoning-gym", fix, task.dataset)
        else:
            yield from _dataset_options(f"{path}.procedural[{i}].config", task, names[task.dataset])


def _dataset_options(path: str, task: ProceduralTask, text: str) -> Iterator[Violation]:
    """Options against the fields of the dataset's configuration class, which is read and not imported."""
    tree = ast.parse(text)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) > 2]
    registered = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id == "register_dataset"]
    named = {node.args[2].id for node in registered if isinstance(node.args[2], ast.Name)}
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in named]
    if len(classes) != 1:
        return  # laid out in a way that isn't known here; the dataset itself refuses what it doesn't know
    lines = [line for line in classes[0].body if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)]
    fields = {line.target.id: ast.unparse(line.annotation) for line in lines if isinstance(line.target, ast.Name)}
    for name, said in Signature(frozenset(), fields, takes_any=False).problems(task.config):
        if name not in ("seed", "size"):  # which another rule explains
            yield problem(f"{path}.{name}", f"{task.dataset}: {said}", "", task.config[name])


def model_checks(config: RunConfig) -> Iterator[Violation]:
    """Local model folders are there; a reward model is one."""
    for role in config.roles:
        name = config.model_path(role)
        args = config.roles[role].model_args
        scores = isinstance(config, RLConfig) and name == config.reward_pretrain
        default = "reward_pretrain" if scores else "pretrain"
        path = f"{role}.model_args.model_name_or_path" if args.model_name_or_path else default
        folder = Path(name).expanduser()
        if not folder.exists() and not config.makes_model:
            if not _HUB_ID.match(name) or ("/" in name and Path(name).parent.is_dir()):
                expected = f"a model folder that exists, seen from {Path.cwd()}, or a hub id such as org/name"
                made = "run `make quickstart`, which makes it" if folder.name == SMOLLM2_FOLDER else ""
                yield Violation(path, expected, made or "check the path", name)
            elif said := hub_problem(name):
                yield problem(path, said, "check the name, or give a local folder", name)
        elif folder.exists() and not (folder / "config.json").is_file():
            yield Violation(path, "a Hugging Face model folder with a config.json", "check the path", name)
        elif isinstance(worker := config.roles[role], RewardModelConfig):
            shape = read_shape(name, args.model_config_kwargs)
            limit = shape.positions if shape is not None else None
            yield from classifier_checks(role, worker, folder / "config.json", limit)


def shape_checks(config: RunConfig) -> Iterator[Violation]:
    """Models whose config.json is at hand hold sequences this long, and their role's layout can divide them."""
    for role, worker in config.roles.items():
        name = config.model_path(role)
        shape = read_shape(name, worker.model_args.model_config_kwargs)
        if shape is None:
            continue
        length = config.max_sequence_length
        plays = not isinstance(worker, (RewardModelConfig, JudgeConfig))
        if plays and shape.positions is not None and length > shape.positions:
            default = "if null: prompt_length + response_length"
            expected = f"at most {shape.positions} tokens ({default}), all that {name} can hold"
            fix = f"sequence_length={shape.positions}"
            if isinstance(config, RLConfig):
                # What is there keeps its share, and neither becomes longer than it is.
                response = min(config.response_length, max(1, shape.positions // 2))
                prompt = min(config.prompt_length, max(1, shape.positions - response))
                response = min(config.response_length, max(1, shape.positions - prompt))
                fix = f"prompt_length={prompt} response_length={response}"
                fix += "" if config.sequence_length is None else f" sequence_length={shape.positions}"
            yield Violation("sequence_length", expected, fix, length)
        yield from shape_rules(role, worker, name, shape)


def adapter_checks(config: RunConfig) -> Iterator[Violation]:
    """peft is there for roles with LoRA, and so are the adapters that they start from."""
    for role, worker in config.roles.items():
        args = worker.model_args
        if not args.uses_lora:
            continue
        name = args.adapter_name_or_path
        key = f"{role}.model_args.{'lora_rank' if name is None else 'adapter_name_or_path'}"
        if importlib.util.find_spec("peft") is None:
            expected = f"its package; {MISSING['peft']}"
            yield Violation(key, expected, "install it, or remove the key", name or args.lora_rank)
        if name is not None and not (Path(name).expanduser() / "adapter_config.json").is_file():
            expected = f"a folder with an adapter_config.json, as peft writes it{_nearby(Path(name))}"
            yield Violation(key, expected, "check the path", name)


def folder_checks(config: RunConfig) -> Iterator[Violation]:
    """Folders can be written; the checkpoint to resume from is there."""
    told: set[Path] = set()
    for key, folder in _output_folders(config).items():
        there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
        if there not in told and not there.is_dir():
            yield Violation(key, f"a folder; {there} is a file", "choose another name", str(folder))
        elif there not in told and not os.access(there, os.W_OK | os.X_OK):
            yield Violation(key, f"a folder that can be written; {there} can't", "choose another place", str(folder))
        told.add(there)
    yield from _resume(config)


def _output_folders(config: RunConfig) -> dict[str, Path]:
    """Folders that the run writes into, by their keys."""
    return {
        "output_dir": config.output_path,
        "logging_dir": config.logging_path,
        "checkpoint_config.output_dir": config.checkpoint_path,
        **{key: Path(name) for key, name in config.extra_output_dirs.items() if name},
    }


def export_checks(config: RunConfig) -> Iterator[Violation]:
    """The trained model has room, and a folder of its own."""
    if not config.exports:
        return
    folder = config.export_path.absolute()
    models = {role: config.model_path(role) for role in config.roles}
    for role, name in models.items():
        if Path(name).expanduser().absolute() == folder:
            expected = f"a folder other than that of the model of {role}, which would be moved"
            yield Violation("export_dir", expected, "name a new folder, or another output_dir", str(config.export_path))
            return
    if folder.is_dir():
        names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith((".", "earlier.")))
        if names and not {"config.json", "roll_export.json"} & set(names):
            expected = f"a folder for the trained model alone; {folder} holds {names[0]}"
            yield Violation("export_dir", expected, "name a new folder", config.export_dir)
            return
    for key, other in _output_folders(config).items():
        place = other.resolve()
        if key != "export_dir" and folder.resolve() in (place, *place.parents):
            # What is there when the model arrives is moved away, or deleted.
            expected = f"a folder for the trained model alone, not that of {key} or one around it"
            yield Violation("export_dir", expected, "name a new folder", str(config.export_path))
            return
    there = next(place for place in (folder, *folder.parents) if place.is_dir())
    model = Path(models["actor_train"]).expanduser()
    needed = sum(file.stat().st_size for file in model.glob("*.safetensors")) if model.is_dir() else 0
    free = shutil.disk_usage(there).free
    if needed > free:
        expected = (
            f"a place with room for the trained model: its weights take {_size(needed)} or more, and {there} has "
            f"{_size(free)} left"
        )
        fix = "free some, name another disk, or export_model=false"
        yield Violation("export_dir", expected, fix, str(config.export_path))


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _resume(config: RunConfig) -> Iterator[Violation]:
    wanted = config.resume_from_checkpoint
    if wanted is True and not (config.checkpoint_path.is_dir() and any(config.checkpoint_path.iterdir())):
        expected = f"checkpoints in {config.checkpoint_path}, and there are none"
        yield Violation("resume_from_checkpoint", expected, "false, auto, or the folder of a checkpoint", True)
    elif isinstance(wanted, str) and wanted != "auto" and not Path(wanted).expanduser().is_dir():
        expected = f"true, false, auto, or a checkpoint's folder that exists{_nearby(Path(wanted))}"
        yield Violation("resume_from_checkpoint", expected, "check the path", wanted)


def function_checks(config: RunConfig) -> Iterator[Violation]:
    """Functions of the user's own exist; nothing is imported."""
    if config.prepare is not None:
        yield from _named("prepare", config.prepare)
    for role, worker in config.roles.items():
        if OWN_PATH.match(worker.strategy_args.strategy_name):
            yield from _named(f"{role}.strategy_args.strategy_name", worker.strategy_args.strategy_name)
    for tracker in config.track_with:
        if OWN_PATH.match(tracker):
            args = (f"tracker_kwargs.{tracker}", config.tracker_kwargs.get(tracker, {}))
            yield from _named("track_with", tracker, "class", args)
        entry = TRACKERS.get(tracker)
        if isinstance(entry, TrackerEntry) and importlib.util.find_spec(entry.package) is None:
            fix = f"pip install {entry.package}, or leave it out"
            yield Violation("track_with", f"a tracker whose package is installed; {tracker} isn't", fix, tracker)


def algorithm_checks(config: RLConfig) -> Iterator[Violation]:
    """So do estimators and losses."""
    for key in ("adv_estimator", "policy_loss"):
        value = getattr(config, key)
        if OWN_PATH.match(value):
            yield from _named(key, value, args=(f"{key}_args", getattr(config, f"{key}_args")))


def preference_checks(config: DPOConfig) -> Iterator[Violation]:
    """So does the loss of preferences."""
    if OWN_PATH.match(config.loss_type):
        yield from _named("loss_type", config.loss_type, args=("loss_type_args", config.loss_type_args), skip=2)


def reward_checks(config: RLVRConfig) -> Iterator[Violation]:
    """So do rewards, with their options, and rollouts."""
    custom = config.custom_reward_function
    for domain, reward in config.rewards.items():
        args = (f"rewards.{domain}.reward_kwargs", reward.reward_kwargs)
        if OWN_PATH.match(reward.name):
            yield from _named_reward(f"rewards.{domain}.name", reward.name, args)
        elif reward.name in REWARDS:
            yield from _built_in(reward.name, args)
        elif reward.name == "custom" and custom is not None:
            path = f"{custom.path}:{custom.name}"
            args = (args[0], {**custom.reward_kwargs, **args[1]})
            yield from _named_reward("custom_reward_function.path", path, args)
        for part, term in reward.parts.items():
            where = f"rewards.{domain}.parts.{part}"
            args = (f"{where}.reward_kwargs", term.reward_kwargs)
            if OWN_PATH.match(term.name):
                yield from _named_reward(f"{where}.name", term.name, args)
            elif term.name in REWARDS:
                yield from _built_in(term.name, args)
        if reward.rollout is not None:
            yield from _named(f"rewards.{domain}.rollout", reward.rollout, "class")


def _named_reward(key: str, value: str, args: Arguments) -> Iterator[Violation]:
    """There is such a function; one in a file can be called as it will be."""
    missing = list(_named(key, value))
    yield from missing
    where, _, name = value.rpartition(":")
    if where.endswith(".py") and not missing:
        yield from _reward_arguments(Path(where).expanduser(), name, value, args)


def _built_in(reward: str, args: Arguments) -> Iterator[Violation]:
    module, _, name = REWARDS[reward].path.rpartition(":")
    file = Path(__file__).parents[3] / (module.replace(".", "/") + ".py")
    yield from _reward_arguments(file, name, reward, args)


def env_checks(config: AgenticConfig) -> Iterator[Violation]:
    """So do environments, and the configuration of the warm start."""
    for tag, env in config.custom_envs.items():
        if ":" in env.env_type:
            yield from _named(f"custom_envs.{tag}.env_type", env.env_type, "class")
    if config.warm_start is not None and not Path(config.warm_start).is_file():
        expected = f"a configuration file that exists, seen from {Path.cwd()}{_nearby(Path(config.warm_start))}"
        yield Violation("warm_start", expected, "check the path", config.warm_start)


Arguments = tuple[str, Mapping[str, Any]]
"""The key of keyword arguments, and what it says."""


def _named(
    key: str, value: str, kind: str = "function", args: Arguments | None = None, skip: int = 1
) -> Iterator[Violation]:
    """There is such an object; one in a file takes `args` besides its first `skip` parameters."""
    where, _, name = value.rpartition(":")
    if not where or not name:
        yield Violation(key, "package.module:name or path/to/file.py:name", "", value)
        return
    if not where.endswith(".py"):
        package = where.split(".")[0]
        if not package or importlib.util.find_spec(package) is None:
            expected = f"something that can be imported; there is no package {package!r}"
            yield Violation(key, expected, "install it, or put its folder on PYTHONPATH", where)
        return
    missing = list(_in_file(key, Path(where), name, kind))
    yield from missing
    if args is not None and not missing:
        yield from _arguments(Path(where).expanduser(), name, value, args, skip)


def _arguments(file: Path, name: str, value: str, args: Arguments, skip: int) -> Iterator[Violation]:
    key, given = args
    for arg, said in signature_in_source(_definition(file, name), skip=skip).problems(given):
        yield Violation(f"{key}.{arg}", f"an argument of {value}: {said}", f"see {file}", given.get(arg, NO_VALUE))


def _reward_arguments(file: Path, name: str, value: str, args: Arguments) -> Iterator[Violation]:
    key, given = args
    node, where = _definition(file, name), f"{key.rpartition('.')[0]}.name"
    if isinstance(node, ast.ClassDef):
        yield Violation(where, f"a function, plain or async; {name} is a class", f"see {file}", value)
        return
    style = call_style_in_source(node)
    signature = signature_in_source(node, skip=style.positional)
    call = f"{name}{signature.text} is called as {style.called}"
    if signature.too_few:
        yield Violation(where, f"a function that can be called; {call}", f"see {file}", value)
    for arg, said in reward_problems(signature, style, given):
        yield Violation(
            f"{key}.{arg}", f"an argument of {value}: {said}", f"see {file}: {call}", given.get(arg, NO_VALUE)
        )


def _definition(file: Path, name: str) -> ast.AST:
    """Return the function or class of that name; the whole file where it is made otherwise."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    made = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return next((node for node in tree.body if isinstance(node, made) and node.name == name), tree)


def _in_file(path: str, file: Path, name: str, kind: str = "function") -> Iterator[Violation]:
    file = file.expanduser()
    if not file.is_file():
        expected = f"a Python file that exists, seen from {Path.cwd()}{_nearby(file)}"
        yield Violation(path, expected, "check the path", str(file))
        return
    try:
        text = file.read_text(encoding="utf-8")
        symbols = symtable.symtable(text, str(file), "exec").get_symbols()
    except (SyntaxError, UnicodeDecodeError) as error:
        line = getattr(error, "lineno", None)
        yield Violation(path, f"valid Python; {file}:{line}: {error}", "mend the file", str(file))
        return
    if not any(symbol.get_name() == name and (symbol.is_assigned() or symbol.is_imported()) for symbol in symbols):
        made = ast.ClassDef if kind == "class" else (ast.FunctionDef, ast.AsyncFunctionDef)
        there = sorted(node.name for node in ast.parse(text).body if isinstance(node, made))
        expected = f"a {kind} {name!r} in {file}; it has {', '.join(there) or 'none'}"
        yield Violation(path, expected, did_you_mean(name, there), name)


_RUN = (model_checks, teacher_checks, shape_checks, adapter_checks, folder_checks, export_checks, function_checks)
RLVR_CHECKS = (data_checks, argument_checks, algorithm_checks, reward_checks, sandbox_checks, *_RUN)
DISTILL_CHECKS = RLVR_CHECKS
AGENTIC_CHECKS = (argument_checks, algorithm_checks, env_checks, *_RUN)
SFT_CHECKS = (data_checks, *_RUN)
DPO_CHECKS = (data_checks, preference_checks, *_RUN)
REWARD_MODEL_CHECKS = (data_checks, *_RUN)
"""All but those of `machine_checks`, in the order of their messages."""


def _nearby(file: Path) -> str:
    """What the nearest existing folder holds that looks like `file`."""
    folder = file.expanduser().parent
    if not folder.is_dir():
        return f"; there is no folder {str(folder)!r}"
    near = nearest(file.name, [entry.name for entry in folder.iterdir()])
    return f"; {near}" if near else ""
