"""Arguments that an installed engine takes, read from its sources: importing one takes seconds and a working torch."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

from roll.configs.catalog.strategy_table import STRATEGIES
from roll.configs.errors import Violation, nearest
from roll.configs.schema.engine_config import EngineConfig
from roll.configs.schema.rl_config import RLConfig


def argument_checks(config: RLConfig) -> Iterator[Violation]:
    """Check that the installed engine has every argument in `engine_args`. `machine_checks` reports a missing
    engine."""
    strategy = config.actor_infer.strategy_args
    options = strategy.strategy_config
    folder = package_folder(strategy.strategy_name) if isinstance(options, EngineConfig) else None
    if folder is None or not isinstance(options, EngineConfig):
        return
    known = arguments_of(strategy.strategy_name, folder)
    if not known:
        return  # laid out in a way that isn't known here; the engine itself refuses what it doesn't know
    words = known | {spec.name for spec in fields(options)} - {"engine_args"}
    for key, value in options.engine_args.items():
        if key not in words and not options.knows(key):
            path = f"actor_infer.strategy_args.strategy_config.{key}"
            expected = f"an argument that the installed {STRATEGIES[strategy.strategy_name].project} has"
            near = nearest(key, [word for word in words if not options.knows(word)])
            yield Violation(path, expected, near or f"see {_source(folder)}", value)


def package_folder(package: str) -> Path | None:
    """Return where a package is installed; None if it isn't. Imports nothing."""
    spec = importlib.util.find_spec(package)
    locations = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(locations))) if locations else None


def _source(folder: Path) -> Path:
    return folder / ("engine/arg_utils.py" if folder.name == "vllm" else "srt/server_args.py")


@cache
def arguments_of(strategy: str, folder: Path) -> frozenset[str]:
    """Names of the engine's arguments; empty if its sources don't show them.

    vLLM: fields of the dataclasses `EngineArgs` and `AsyncEngineArgs`. SGLang: fields of `ServerArgs`, or in newer
    versions of the structs with an `_NS_PATH` from which it is put together.
    """
    if strategy == "vllm":
        return _fields(folder / "engine" / "arg_utils.py", {"EngineArgs", "AsyncEngineArgs"})
    names = set(_fields(folder / "srt" / "server_args.py", {"ServerArgs"}))
    for file in sorted((folder / "srt" / "arg_groups" / "fields").glob("*.py")):
        names |= _fields(file, None)
    return frozenset(names)


def _fields(file: Path, classes: set[str] | None) -> frozenset[str]:
    """Annotated public names in these classes of a file, or in those with an `_NS_PATH`."""
    if not file.is_file():
        return frozenset()
    nodes = [node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    chosen = [node for node in nodes if (_is_namespace(node) if classes is None else node.name in classes)]
    lines = [line for node in chosen for line in node.body if isinstance(line, ast.AnnAssign)]
    names = [line.target.id for line in lines if isinstance(line.target, ast.Name)]
    return frozenset(name for name in names if not name.startswith("_"))


def _is_namespace(node: ast.ClassDef) -> bool:
    targets = [target for line in node.body if isinstance(line, ast.Assign) for target in line.targets]
    return any(isinstance(target, ast.Name) and target.id == "_NS_PATH" for target in targets)
