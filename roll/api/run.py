"""`roll.train`, `roll.check`, `roll.resume`, `roll.load_run`: docs/python.md has them with examples."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from roll.api.python_arguments import as_file, as_path, first_row, rows_in_words, rows_named

if TYPE_CHECKING:
    from roll.configs.errors import Violation
    from roll.configs.schema.run_config import RunConfig
    from roll.pipelines.run.run_result import RunResult

Config: TypeAlias = "RunConfig | Mapping[str, Any] | str | os.PathLike[str]"
"""A configuration: its YAML file, its keys, or one that is loaded already."""
Rows: TypeAlias = "Iterable[Mapping[str, Any]] | Iterable[str] | str | os.PathLike[str]"
"""Rows of data, or the file that holds them."""
FunctionOrPath: TypeAlias = "Callable[..., Any] | str | Mapping[str, Callable[..., Any] | str]"
"""A function or a class, as itself or as its path; or several by domain or tag."""


def train(
    config: Config,
    *,
    reward: FunctionOrPath | None = None,
    env: FunctionOrPath | None = None,
    data: Rows | None = None,
    validation_data: Rows | None = None,
    **overrides: Any,
) -> RunResult:
    """Run a pipeline to its end and return what it has left.

    Args:
        config: a YAML file, or its contents as a dictionary.
        reward: a function `(response, task, **reward_kwargs) -> float` for the one domain, or functions by domain.
        env: a class derived from `roll.envs.base.Env` for the one tag, or classes by tag.
        data: rows to train on, dictionaries with `prompt` or `messages`.
        validation_data: rows to validate on.
        overrides: further keys, e.g. `max_steps=20`; a dictionary changes the keys of a section that it names.

    Raises `ValueError` for what a user can mend, and what went wrong otherwise.
    """
    arguments = {"reward": reward, "env": env, "data": data, "validation_data": validation_data}
    with rows_named():
        return run(configured(config, arguments, overrides, keeps=True))


def check(
    config: Config,
    *,
    reward: FunctionOrPath | None = None,
    env: FunctionOrPath | None = None,
    data: Rows | None = None,
    validation_data: Rows | None = None,
    **overrides: Any,
) -> RunConfig:
    """Check what `train` would run, without a model, and return the configuration; raise `ValueError` with all that is
    wrong. The arguments are those of `train`."""
    from roll.configs.errors import ConfigError
    from roll.pipelines.check_process import StartCheck
    from roll.utils.terminal import say

    start = StartCheck()
    arguments = {"reward": reward, "env": env, "data": data, "validation_data": validation_data}
    with tempfile.TemporaryDirectory(prefix="roll-") as folder, rows_named():
        checked = configured(config, arguments, overrides, keeps=False, folder=Path(folder))
        if violations := list(start.violations(checked)):
            raise ConfigError(violations)
        for kind, texts in (("warning", start.warnings), ("not looked at", start.unread)):
            for text in texts:
                say(f"{kind}: {rows_in_words(text)}")
        return checked


def resume(run_folder: str | os.PathLike[str], **overrides: Any) -> RunResult:
    """Go on with a run from its newest checkpoint, as `roll resume` does; e.g. with `max_steps=200`."""
    from roll.api.launch import resumed

    with resumed(Path(run_folder), assignments(overrides)) as config:
        return run(config)


def load_run(run_folder: str | os.PathLike[str]) -> RunResult:
    """Return what a run has left in its folder, finished or not. Loads no model."""
    from roll.api.launch import stored_config
    from roll.pipelines.run.run_result import RunResult

    folder = Path(run_folder)
    return RunResult(folder=folder, config=stored_config(folder))


def configured(
    config: Config,
    arguments: Mapping[str, Any],
    overrides: Mapping[str, Any],
    *,
    keeps: bool,
    folder: Path | None = None,
) -> RunConfig:
    """Return the checked configuration of a call. What was `given` is written to `folder`, by default the run's.

    Args:
        keeps: have the run keep its metrics and rollouts, which the result offers.
    """
    from roll.api.launch import load
    from roll.configs.errors import ConfigError
    from roll.configs.parsing.loader import compose_file

    for name in overrides:
        if name in _OF_TRAINERS:
            raise ValueError(f"{name}: this isn't an argument here; {_OF_TRAINERS[name]}")
    changes = assignments(overrides)
    with _file_of(config) as file, _errors_about(config, file):
        plain, cls = compose_file(file, changes)
        target = Path(plain.get("output_dir") or "output") if folder is None else folder
        changes += [
            *_rewards(arguments["reward"], plain, target),
            *_envs(arguments["env"], plain, target),
            *_data(arguments, plain, target),
        ]
        if keeps:
            changes += _recording_overrides(plain, set(cls.__dataclass_fields__), overrides)
        misfits = list(_misfits(arguments["reward"], plain))
        try:
            loaded = load(file, changes)
        except ConfigError as error:
            raise ConfigError([*misfits, *error.violations], error.source) from None
        misfits = list(_misfits(arguments["reward"], plain, loaded))
        if misfits:
            raise ConfigError(misfits, str(file))
        return loaded


_OF_TRAINERS = {
    "callbacks": "a class of yours in track_with=['my.py:Tracker'] is told of every step (docs/metrics.md)",
    "reward_funcs": "reward=function, or reward={'domain': function, ...}",
    "train_dataset": "data=rows, or data='file.jsonl'",
    "eval_dataset": "validation_data=rows, or validation_data='file.jsonl'",
    "model": "pretrain='folder or hub id': models are loaded by the run",
    "peft_config": "actor_train={'model_args': {'lora_rank': 8, 'lora_target': [...]}}",
    "processing_class": "actor_train={'model_args': {'tokenizer_name_or_path': 'folder or hub id'}}",
    "optimizers": "actor_train={'training_args': {...}} has the optimizer and its schedule",
    "args": "give keys one by one, or in the configuration",
}
"""What TRL's trainers take, and what it is here."""


@contextlib.contextmanager
def _errors_about(config: Config, file: Path) -> Iterator[None]:
    """Have errors speak of what the caller wrote: keys and arguments instead of a file for the time being."""
    from roll.configs.errors import ConfigError, of_no_file

    try:
        yield
    except ConfigError as error:
        if not isinstance(config, (str, os.PathLike)):
            error = of_no_file(error, str(file), "the given configuration")
            gone = f" or from the configuration's folder {file.parent}"
            shown = [replace(one, expected=one.expected.replace(gone, "")) for one in error.violations]
            error = ConfigError(shown, error.source)
        named = [
            replace(violation, where="the arguments of the call")
            if violation.where == "the command line"
            else violation
            for violation in error.violations
        ]
        raise ConfigError(named, error.source) from None


def _misfits(
    argument: FunctionOrPath | None, plain: Mapping[str, Any], config: RunConfig | None = None
) -> Iterator[Violation]:
    """Yield why a run can't call a reward function: its signature, which the checks of files read in its source, and
    with a configuration that was read the columns of its rows."""
    from roll.configs.catalog.signatures import MAKES_REWARDS, TOO_FEW, call_style, reward_problems, signature_of
    from roll.configs.checks.reward_columns import RewardColumns
    from roll.configs.errors import Violation
    from roll.configs.schema.rlvr_config import RLVRConfig

    section = plain.get("rewards")
    functions = {} if argument is None else _by_name(argument, _section(plain, "rewards"), "reward", "domain")
    for domain, function in functions.items():
        if inspect.isclass(function) or inspect.isbuiltin(function) or not callable(function):
            continue  # a path, what `as_path` refuses, or what has no signature of Python's
        of_domain = section.get(domain) if isinstance(section, Mapping) else None
        kwargs = dict((of_domain.get("reward_kwargs") if isinstance(of_domain, Mapping) else None) or {})
        try:
            signature = inspect.signature(function)
        except (ValueError, TypeError):
            continue
        style = call_style(list(signature.parameters))
        takes, columns = signature_of(function, skip=style.positional), None
        if style.columns and isinstance(config, RLVRConfig):
            columns = RewardColumns(config).of(domain, takes.required - style.supplied - set(kwargs))
        wrong = [f"{name}: {problem}" for name, problem in reward_problems(takes, style, kwargs, columns)]
        if takes.too_few:
            wrong.append(TOO_FEW)
        if takes.returns_function:
            wrong = [MAKES_REWARDS]
        if wrong:
            expected = f"a function that can be called as {style.called}; {'; '.join(wrong)}"
            name = getattr(function, "__name__", type(function).__name__)
            yield Violation("reward", expected, "", f"{name}{signature}")


def run(config: RunConfig) -> RunResult:
    """Run a checked configuration. A failure's traceback is also written to `<logging_dir>/error.txt`."""
    from roll.api.launch import run_logged

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run_logged(config)
    return _in_thread(lambda: run_logged(config))  # a notebook's own loop runs in this one


def assignments(overrides: Mapping[str, Any]) -> list[str]:
    """Return `key=value` of each override, as Hydra reads it."""
    return [f"{key}={_literal(value)}" for key, value in overrides.items()]


def _literal(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_literal(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, (str, os.PathLike)):
        from hydra.core.override_parser.types import Quote, QuotedString

        return str(QuotedString(text=os.fspath(value), quote=Quote.single).with_quotes())
    raise ValueError(f"got {value!r}, a {type(value).__name__}, expected what YAML can say")


@contextlib.contextmanager
def _file_of(config: Config) -> Iterator[Path]:
    """Yield the file of a configuration, written for the time being if it is none."""
    from dataclasses import asdict

    import yaml

    from roll.configs.parsing.find import find_config
    from roll.configs.schema.run_config import RunConfig

    if isinstance(config, (str, os.PathLike)):
        yield find_config(Path(config))
        return
    tree = asdict(config) if isinstance(config, RunConfig) else config
    if not isinstance(tree, Mapping):
        raise ValueError(
            f"config: got {type(config).__name__}, expected a YAML file's path, or its keys as a dictionary"
        )
    with tempfile.TemporaryDirectory(prefix="roll-") as folder:
        file = Path(folder) / "config.yaml"
        try:
            file.write_text(yaml.safe_dump(_plain(tree), sort_keys=False, allow_unicode=True), encoding="utf-8")
        except yaml.YAMLError as error:
            raise ValueError(f"config: it holds what YAML can't say: {error}") from None
        yield file


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _by_name(argument_value: FunctionOrPath, known: list[str], argument: str, what: str) -> dict[str, Any]:
    """Return what was given by domain or tag; one alone belongs to the only one there is, or to one called `own`."""
    if isinstance(argument_value, Mapping):
        return dict(argument_value)
    if len(known) > 1:
        raise ValueError(
            f"{argument}: the configuration has several {what}s, {', '.join(known)}; give a dictionary: "
            f"{argument}={{{known[0]!r}: ...}}"
        )
    return {known[0] if known else "own": argument_value}


def _section(plain: Mapping[str, Any], name: str) -> list[str]:
    section = plain.get(name)
    return list(map(str, section)) if isinstance(section, Mapping) else []


def _rewards(argument: FunctionOrPath | None, plain: Mapping[str, Any], folder: Path) -> Iterator[str]:
    if argument is not None:
        for domain, function in _by_name(argument, _section(plain, "rewards"), "reward", "domain").items():
            yield f"rewards.{domain}.name={_literal(as_path(function, folder, key='reward'))}"


def _envs(argument: FunctionOrPath | None, plain: Mapping[str, Any], folder: Path) -> Iterator[str]:
    if argument is not None:
        for tag, env in _by_name(argument, _section(plain, "custom_envs"), "env", "tag").items():
            yield f"custom_envs.{tag}.env_type={_literal(as_path(env, folder, key='env'))}"


def _data(arguments: Mapping[str, Any], plain: Mapping[str, Any], folder: Path) -> Iterator[str]:
    for argument, section in (("data", "actor_train"), ("validation_data", "validation")):
        rows = arguments[argument]
        if rows is None:
            continue
        file = as_file(rows, folder, key=argument)
        yield f"{section}.data_args.file_name={_literal([file])}"
        inner = plain.get(section)
        old = inner.get("data_args") if isinstance(inner, Mapping) else None
        old = old if isinstance(old, Mapping) else {}
        if old.get("procedural"):
            yield f"{section}.data_args.procedural=[]"
        if not old.get("prompt") and not old.get("messages"):
            columns = first_row(file)
            role = next((name for name in ("messages", "prompt", "question") if name in columns), None)
            if role is not None:
                yield f"{section}.data_args.{'messages' if role == 'messages' else 'prompt'}={role}"


def _recording_overrides(plain: Mapping[str, Any], keys: set[str], overrides: Mapping[str, Any]) -> Iterator[str]:
    """Have the run write what its result offers, unless the caller says otherwise."""
    trackers = plain.get("track_with", ["stdout", "jsonl"])
    trackers = trackers if isinstance(trackers, list) else [trackers]
    names = [entry.get("name") if isinstance(entry, Mapping) else entry for entry in trackers]
    if "jsonl" not in names:
        yield f"track_with={_literal([*trackers, 'jsonl'])}"
    if "rollout_dump_dir" in keys and not plain.get("rollout_dump_dir") and "rollout_dump_dir" not in overrides:
        yield f"rollout_dump_dir={_literal(Path(plain.get('output_dir') or 'output') / 'rollouts')}"


def _in_thread(call: Callable[[], RunResult]) -> RunResult:
    """Call in a thread of its own; an interrupt of the caller interrupts it too."""
    done: dict[str, Any] = {}

    def work() -> None:
        try:
            done["result"] = call()
        except BaseException as error:  # noqa: BLE001 - raised again where it was called
            done["error"] = error

    thread = threading.Thread(target=work, name="roll.train")
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
        )
        thread.join()
    if "error" in done:
        raise done["error"]
    result: RunResult = done["result"]
    return result
