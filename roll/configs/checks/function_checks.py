"""Functions and classes of the user's own exist and take their options; nothing is imported."""

from __future__ import annotations

import ast
import importlib.util
import symtable
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roll.configs.catalog.definitions import definition_in, module_file
from roll.configs.catalog.entries import OWN_PATH
from roll.configs.catalog.env_table import hub_of
from roll.configs.catalog.reward_table import REWARDS
from roll.configs.catalog.signatures import (
    MAKES_REWARDS,
    TOO_FEW,
    parameter_names,
    reward_problems,
    signature_in_source,
    unknown_state,
    unknown_state_message,
)
from roll.configs.catalog.stage_table import ESTIMATOR_NEEDS, MODEL_OUTPUTS, declared_in_source
from roll.configs.catalog.tracker_table import TRACKERS, TrackerEntry
from roll.configs.checks.folder_checks import nearby, relative_to
from roll.configs.checks.reward_columns import RewardColumns
from roll.configs.errors import NO_VALUE, Violation, did_you_mean, problem
from roll.configs.schema.agentic_config import AgenticConfig
from roll.configs.schema.preference_config import DPOConfig
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.run_config import RunConfig
from roll.utils.importing import load_object

Arguments = tuple[str, Mapping[str, Any]]
"""The key of keyword arguments, and what it says."""

_LOOKS_AT_OPTIONS = frozenset(REWARDS) - {"code", "http", "none", "weighted"}
"""Bundled rewards that can be called without a sandbox or a server."""


def function_checks(config: RunConfig) -> Iterator[Violation]:
    """Check that what any run may name exists: `prepare`, strategies, trackers."""
    if config.prepare is not None:
        yield from named_checks("prepare", config.prepare)
    libraries = {"external_lib": config.external_lib}
    libraries |= {
        f"{role}.model_args.external_lib": worker.model_args.external_lib for role, worker in config.roles.items()
    }
    for key, paths in libraries.items():
        for path in paths:
            yield from _module_checks(key, path)
    for role, worker in config.roles.items():
        if OWN_PATH.match(worker.strategy_args.strategy_name):
            yield from named_checks(f"{role}.strategy_args.strategy_name", worker.strategy_args.strategy_name)
    for tracker in config.track_with:
        if OWN_PATH.match(tracker):
            args = (f"tracker_kwargs.{tracker}", config.tracker_kwargs.get(tracker, {}))
            yield from named_checks("track_with", tracker, "class", args)
        entry = TRACKERS.get(tracker)
        if isinstance(entry, TrackerEntry) and importlib.util.find_spec(entry.package) is None:
            fix = f"pip install {entry.package}, or leave it out"
            yield Violation("track_with", f"a tracker whose package is installed; {tracker} isn't", fix, tracker)


def algorithm_checks(config: RLConfig) -> Iterator[Violation]:
    """Estimators, losses and stages of the user's own exist."""
    for key in ("adv_estimator", "policy_loss"):
        value = getattr(config, key)
        if OWN_PATH.match(value):
            yield from named_checks(key, value, args=(f"{key}_args", getattr(config, f"{key}_args")))
    if OWN_PATH.match(config.adv_estimator) and (declared := declared_in_source(config.adv_estimator)) is not None:
        for name in declared.needs:
            if name not in ESTIMATOR_NEEDS:
                expected = f"an estimator that needs some of {', '.join(ESTIMATOR_NEEDS)}; it needs {name!r}"
                fix = did_you_mean(name, ESTIMATOR_NEEDS)
                if name in MODEL_OUTPUTS:
                    fix = f"a stage can need it: @roll.stage(needs=('advantages', {name!r}), gives=('advantages',))"
                yield Violation("adv_estimator", expected, fix, config.adv_estimator)
    for path in filter(OWN_PATH.match, config.stages):
        yield from _stage_checks(path, config.stage_args.get(path, {}))


def _stage_checks(path: str, options: Mapping[str, Any]) -> Iterator[Violation]:
    """There is such a stage, it declares what it needs and gives, and takes its options."""
    where, _, name = path.rpartition(":")
    file = Path(where).expanduser() if where.endswith(".py") else module_file(where)
    found = None if file is None else definition_in(file, name)
    # Options of a class go to its constructor, which has no parameter by position but the object itself.
    skip = 0 if found is not None and found.is_class else 1
    missing = list(named_checks("stages", path, args=(f"stage_args.{path}", options), skip=skip))
    yield from missing
    if not missing and file is not None and declared_in_source(path) is None:
        expected = f"a stage, and {path} doesn't say what it needs and gives"
        yield Violation("stages", expected, "put @roll.stage(needs=(...), gives=(...)) above it, written out", path)


def preference_checks(config: DPOConfig) -> Iterator[Violation]:
    """So does the loss of preferences."""
    if OWN_PATH.match(config.loss_type):
        yield from named_checks("loss_type", config.loss_type, args=("loss_type_args", config.loss_type_args), skip=2)


def reward_checks(config: RLVRConfig) -> Iterator[Violation]:
    """So do rewards, with their options and the columns that they take, and rollouts."""
    custom, columns = config.custom_reward_function, RewardColumns(config)
    for domain, reward in config.rewards.items():
        args = (f"rewards.{domain}.reward_kwargs", reward.reward_kwargs)
        if OWN_PATH.match(reward.name):
            yield from _named_reward(f"rewards.{domain}.name", reward.name, args, (columns, domain))
        elif reward.name in REWARDS:
            yield from _built_in(reward.name, args)
        elif reward.name == "custom" and custom is not None:
            path = f"{custom.path}:{custom.name}"
            args = (args[0], {**custom.reward_kwargs, **args[1]})
            yield from _named_reward("custom_reward_function.path", path, args, (columns, domain))
        for part, term in reward.parts.items():
            where = f"rewards.{domain}.parts.{part}"
            args = (f"{where}.reward_kwargs", term.reward_kwargs)
            if OWN_PATH.match(term.name):
                yield from _named_reward(f"{where}.name", term.name, args, (columns, domain))
            elif term.name in REWARDS:
                yield from _built_in(term.name, args)
        if reward.rollout is not None:
            yield from named_checks(f"rewards.{domain}.rollout", reward.rollout, "class")


def _named_reward(
    key: str, value: str, args: Arguments, rows: tuple[RewardColumns, str] | None = None
) -> Iterator[Violation]:
    """There is such a function, and it can be called as it will be, as far as its source says."""
    missing = list(named_checks(key, value))
    yield from missing
    where, _, name = value.rpartition(":")
    file = Path(where).expanduser() if where.endswith(".py") else module_file(where)
    if file is not None and not missing:
        yield from _reward_arguments(file, name, value, args, rows, key)


def _built_in(reward: str, args: Arguments) -> Iterator[Violation]:
    module, _, name = REWARDS[reward].path.rpartition(":")
    file = Path(__file__).parents[3] / (module.replace(".", "/") + ".py")
    wrong = list(_reward_arguments(file, name, reward, args))
    yield from wrong
    key, kwargs = args
    # Importing it takes a tenth of a second: only where its options aren't all at their defaults, or are needed.
    if not wrong and reward in _LOOKS_AT_OPTIONS and (kwargs or reward == "length"):
        refused = load_object("roll.rewards.base:refused_options")
        if message := refused(reward, load_object(REWARDS[reward].path), kwargs):
            yield problem(key, message, f"see {name} in docs/rewards.md")


def env_checks(config: AgenticConfig) -> Iterator[Violation]:
    """Check that environments exist, and the configuration of the warm start."""
    for tag, env in config.custom_envs.items():
        own_interpreter = config.env_workers.python is not None  # what is imported there isn't known here
        if ":" in env.env_type and not hub_of(env.env_type) and (".py:" in env.env_type or not own_interpreter):
            yield from named_checks(f"custom_envs.{tag}.env_type", env.env_type, "class")
        for role, role_config in env.roles.items():
            if OWN_PATH.match(role_config.player):
                role_path = f"custom_envs.{tag}.roles.{role}"
                args = (f"{role_path}.player_config", role_config.player_config)
                yield from named_checks(f"{role_path}.player", role_config.player, "class", args, skip=0)
    if config.warm_start is not None and not Path(config.warm_start).is_file():
        expected = f"a configuration file that exists, {relative_to()}{nearby(Path(config.warm_start))}"
        yield Violation("warm_start", expected, "check the path", config.warm_start)


def _module_checks(key: str, path: str) -> Iterator[Violation]:
    """There is such a package or file."""
    if path.endswith(".py"):
        yield from _python_file(key, Path(path))
        return
    package = path.split(".")[0]
    if not package or importlib.util.find_spec(package) is None:
        expected = f"package.module or path/to/file.py; there is no package {package!r}"
        yield Violation(key, expected, "install it, or put its folder on PYTHONPATH", path)


def named_checks(
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
        yield from _arguments(key, Path(where).expanduser(), name, value, args, skip)


def _arguments(key: str, file: Path, name: str, value: str, args: Arguments, skip: int) -> Iterator[Violation]:
    (options, values), found = args, definition(file, name)
    signature, fix = signature_in_source(found, skip=skip), f"see {file}"
    if skip and isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)):
        many = "one argument" if skip == 1 else f"{skip} arguments"
        fix += f": {name}{signature.text} is called with {many} by position, and options by name"
        if signature.too_few:
            yield Violation(key, f"a function that takes {many} by position", fix, value)
    for arg, wrong in signature.problems(values):
        yield Violation(f"{options}.{arg}", f"an argument of {value}: {wrong}", fix, values.get(arg, NO_VALUE))


def _reward_arguments(
    file: Path, name: str, value: str, args: Arguments, rows: tuple[RewardColumns, str] | None = None, where: str = ""
) -> Iterator[Violation]:
    (key, kwargs), target = args, definition_in(file, name)
    where = where or f"{key.rpartition('.')[0]}.name"
    if target is None:
        return
    if target.is_class:
        yield Violation(where, f"a function, plain or async; {name} is a class", f"see {file}", value)
        return
    style = target.style
    signature = target.signature(skip=style.positional)
    call = f"{name}{signature.text} is called as {style.called}"
    unfit = MAKES_REWARDS if signature.returns_function else TOO_FEW if signature.too_few else None
    if unfit is not None:
        yield Violation(where, f"a function that can be called: {unfit}; {call}", f"see {file}", value)
        return
    columns = None
    if style.columns and rows is not None:
        columns = rows[0].of(rows[1], signature.required - style.supplied - set(kwargs))
    for arg, wrong in reward_problems(signature, style, kwargs, columns):
        if arg in kwargs or not style.columns:
            expected = f"an argument of {value}: {wrong}"
            yield Violation(f"{key}.{arg}", expected, f"see {file}: {call}", kwargs.get(arg, NO_VALUE))
        else:
            yield Violation(where, f"a function that can be called; {arg}: {wrong}", f"see {file}: {call}", value)
    if style.columns and (names := unknown_state(target.node)):
        yield Violation(where, f"a function that can be called; {unknown_state_message(names)}", f"see {file}", value)
    if style.needs_truth and rows is not None and set(parameter_names(target.node)) & {"ground_truth", "ground_truths"}:
        there = rows[0].of(rows[1], ("ground_truth",))
        if there is not None and "ground_truth" not in there:
            expected = f"rows with a ground truth, which this function is given; columns: {', '.join(sorted(there))}"
            yield Violation(where, expected, "name the column in data_args.ground_truth", value)


def definition(file: Path, name: str) -> ast.AST:
    """Return the function or class of that name; the whole file where it is made otherwise."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    made = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return next((node for node in tree.body if isinstance(node, made) and node.name == name), tree)


def _python_file(path: str, file: Path) -> Iterator[Violation]:
    """Check that there is such a file, and that Python can read it."""
    file = file.expanduser()
    if not file.is_file():
        expected = f"a Python file that exists, {relative_to()}{nearby(file)}"
        yield Violation(path, expected, "check the path", str(file))
        return
    try:
        symtable.symtable(file.read_text(encoding="utf-8"), str(file), "exec")
    except (SyntaxError, UnicodeDecodeError) as error:
        line = getattr(error, "lineno", None)
        yield Violation(path, f"valid Python; {file}:{line}: {error}", "mend the file", str(file))


def _in_file(path: str, file: Path, name: str, kind: str = "function") -> Iterator[Violation]:
    unreadable = list(_python_file(path, file))
    yield from unreadable
    if unreadable:
        return
    file = file.expanduser()
    text = file.read_text(encoding="utf-8")
    symbols = symtable.symtable(text, str(file), "exec").get_symbols()
    if not any(symbol.get_name() == name and (symbol.is_assigned() or symbol.is_imported()) for symbol in symbols):
        made = ast.ClassDef if kind == "class" else (ast.FunctionDef, ast.AsyncFunctionDef)
        there = sorted(node.name for node in ast.parse(text).body if isinstance(node, made))
        expected = f"a {kind} {name!r} in {file}; it has {', '.join(there) or 'none'}"
        yield Violation(path, expected, did_you_mean(name, there), name)
