"""YAML files before Hydra reads them: what would take it for ever, or end it with a traceback, is refused with its
line; and on which line each key stands."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from roll.configs.errors import ConfigError, Violation, problem

DEEPEST = 64
"""Levels of sections and lists. The deepest key of this project is on level 6."""
_PATHS = ("dir", "path", "pretrain", "file_name", "resume_from_checkpoint", "prepare", "warm_start", "env_type")
"""How keys end that name a file or folder; some may name other things as well."""
_MAY_BE_EMPTY = ("resume_from_checkpoint", "env_type")
"""Those of them about which another rule says more."""
_LONGEST_PATH, _LONGEST_NAME = 4096, 255


def value_problem(value: Any, depth: int = 0) -> str:
    """Return what should stand in place of `value`, of which a key says no more than that it is one; empty if it may.

    Such values go on to code of others, as keyword arguments or as overrides of a model's configuration.
    """
    if depth > DEEPEST:
        return f"at most {DEEPEST} levels of sections and lists"
    if isinstance(value, float) and not math.isfinite(value):
        return "finite numbers"
    if isinstance(value, str) and "\0" in value:
        return "text without zero bytes"
    inside = [*value, *value.values()] if isinstance(value, Mapping) else value
    if isinstance(inside, (list, tuple)):
        return next((text for entry in inside if (text := value_problem(entry, depth + 1))), "")
    return ""


def path_problem(key: str, text: str) -> str:
    """Return what should stand in place of a text that can't be what `key` names; empty if it may."""
    if "\0" in text:
        return "text without zero bytes"
    last = key.rpartition(".")[2].partition("[")[0]
    if not last.endswith(_PATHS):
        return ""
    if not text.strip() and last not in _MAY_BE_EMPTY:
        return "a path that isn't empty"
    longest = max(len(part.encode(errors="replace")) for part in text.split("/"))
    if len(text) > _LONGEST_PATH or longest > _LONGEST_NAME:
        return f"a path of at most {_LONGEST_PATH} characters, and {_LONGEST_NAME} between two slashes"
    return ""


_LONGEST_FILE = 4 * 2**20
_MAX_VALUES = 100_000
"""Values of a file once its aliases are filled in. Nine lists of nine aliases each are a billion."""


def read_yaml(file: Path) -> Mapping[Any, Any]:
    """Return what a file says. Raises `ConfigError` for what isn't YAML, isn't text, isn't a mapping, is too much."""
    import yaml

    try:
        if file.stat().st_size > _LONGEST_FILE:
            raise _refused(file, f"it is larger than {_LONGEST_FILE >> 20} MiB, and no configuration is")
        text = file.read_text(encoding="utf-8")
        # What isn't YAML the slower parser says better.
        with contextlib.suppress(yaml.YAMLError):
            _check_events(file, yaml.parse(text, Loader=_loader()))
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError([syntax_violation(error, file)]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([Violation(str(file), f"UTF-8 text; {error}")]) from None
    except OSError as error:
        raise _refused(file, f"it can't be read: {error.strerror}") from None
    except (ValueError, RecursionError, TypeError, AttributeError, OverflowError) as error:
        # Of the constructors: a date of month 13, a number of 5,000 digits.
        reason = str(error).split(";")[0] or type(error).__name__
        raise _refused(file, f"a value in it can't be read: {reason}") from None
    if not isinstance(tree, Mapping):
        raise ConfigError([Violation(str(file), "keys and values", "e.g. pipeline: rlvr", tree)])
    return tree


def lines_of(file: Path) -> dict[str, int]:
    """Return the line, from 1, of every key of a file that `read_yaml` takes, by dotted path."""
    import yaml

    lines: dict[str, int] = {}

    def walk(node: Any, path: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                below = f"{path}.{key.value}" if path else str(key.value)
                lines.setdefault(below, key.start_mark.line + 1)
                walk(value, below)
        elif isinstance(node, yaml.SequenceNode):
            for i, entry in enumerate(node.value):
                lines.setdefault(f"{path}[{i}]", entry.start_mark.line + 1)
                walk(entry, f"{path}[{i}]")

    walk(yaml.compose(file.read_text(encoding="utf-8"), Loader=_loader()), "")
    return lines


def syntax_violation(error: Exception, file: Path) -> Violation:
    """Return what a parser of YAML says, with the place."""
    mark = getattr(error, "problem_mark", None)
    reason = getattr(error, "problem", None) or str(error)
    name = file if mark is None or not _is_file(mark.name) else mark.name
    where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark is not None else str(file)
    fix = "a tab may not indent; use spaces" if "\\t" in reason else "check indentation, colons, quotes, brackets"
    if reason.startswith("found duplicate key"):
        fix = "remove one of the two"
    return Violation(where, f"valid YAML; {reason}", fix)


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False


def _loader() -> Any:
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _refused(file: Path, sentence: str, line: int | None = None) -> ConfigError:
    where = str(file) if line is None else f"{file}:{line}"
    return ConfigError([problem(where, sentence, "a configuration is small and flat: write it out, without anchors")])


def _check_events(file: Path, events: Iterator[Any]) -> None:
    """Count values and levels as the parser goes, without building anything."""
    import yaml

    sizes: dict[str, int] = {}
    open_nodes: list[list[Any]] = [["", 0]]
    """Anchor and values so far of everything that has begun and not ended."""
    for event in events:
        size, anchor = 0, getattr(event, "anchor", None) or ""
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == name for name, _ in open_nodes):
                raise _refused(file, f"the alias *{anchor} stands inside what it refers to", line)
            size = sizes.get(anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
            if anchor:
                sizes[anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append([anchor, 1])
        elif isinstance(event, yaml.CollectionEndEvent):
            name, size = open_nodes.pop()
            if name:
                sizes[name] = size
        open_nodes[-1][1] += size
        if len(open_nodes) > DEEPEST:
            raise _refused(file, f"it has more than {DEEPEST} levels of sections and lists", line)
        if open_nodes[-1][1] > _MAX_VALUES:
            raise _refused(file, f"it has more than {_MAX_VALUES} values once its aliases are filled in", line)


_LAST = re.compile(r"(\.[^.\[\]]*|\[\d+\])$")


class KeyLines:
    """Finds the line of a key in a file, or of the nearest section around it that the file has."""

    def __init__(self, file: Path | None, overrides: Sequence[str] = ()) -> None:
        self._file = file
        keys = [override.lstrip("+~").partition("=")[0] for override in overrides]
        self._overridden = tuple(key for key in keys if key)

    @cached_property
    def _lines(self) -> dict[str, int]:
        try:
            return {} if self._file is None else lines_of(self._file)
        except Exception:  # noqa: BLE001 - a message without its line is better than none
            return {}

    def added_to(self, violations: Iterable[Violation]) -> list[Violation]:
        """Return the violations with their places."""
        return [one if one.where else replace(one, where=self._where(one.path)) for one in violations]

    def _where(self, path: str) -> str:
        if any(path == key or path.startswith((f"{key}.", f"{key}[")) for key in self._overridden):
            return "the command line"
        for key_path in _outwards(path):
            if key_path in self._lines:
                return f"{self._file}:{self._lines[key_path]}"
        return ""


def _outwards(path: str) -> Iterable[str]:
    """Yield the path itself, then every section around it; options of `x: {name: ..., option: ...}` stand below `x`."""
    yield path
    for other in ("_args", "_kwargs"):
        first, dot, rest = path.partition(".")
        if first.endswith(other) and dot:
            yield f"{first.removesuffix(other)}.{rest}"
            yield first.removesuffix(other)
    while match := _LAST.search(path):
        path = path[: match.start()]
        yield path
