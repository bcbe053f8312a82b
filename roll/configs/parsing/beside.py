"""Files of functions that a configuration names: seen from the working directory, else beside the configuration.

`rewards/sums.py:near` is looked for in the folder of the YAML too. So is a path that begins with the last folders of
that one, as the examples have it: `examples/sft/sums.py` of `examples/sft/job.yaml`, wherever the checkout lies.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FUNCTION_FILE = re.compile(r"([^:\n]+\.py)(:\w+)?")
_CONFIGS = ("warm_start",)
"""Keys whose value is another configuration."""


def with_files_beside(plain: Any, file: Path) -> Any:
    """Return a composed tree in which paths to files that are only beside `file` lead there."""
    return _walked(plain, file.parent.absolute(), "")


def _walked(value: Any, folder: Path, key: str) -> Any:
    if isinstance(value, Mapping):
        other_folder = value.get("cwd") is not None  # its programs and functions are seen from there
        return {
            name: inner if other_folder and name in ("command", "agent") else _walked(inner, folder, str(name))
            for name, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_walked(inner, folder, key) for inner in value]
    if not isinstance(value, str):
        return value
    if key == "command" and ".py" in value and " " in value:
        return _command(value, folder)
    match = _FUNCTION_FILE.fullmatch(value)
    if match is not None:
        return f"{_there(match[1], folder)}{match[2] or ''}"
    return _there(value, folder) if key in _CONFIGS else value


def _command(text: str, folder: Path) -> str:
    try:
        words = shlex.split(text)
    except ValueError:
        return text
    moved = [_there(word, folder) if word.endswith(".py") else word for word in words]
    return text if moved == words else shlex.join(moved)


def _there(text: str, folder: Path) -> str:
    path = Path(text)
    if path.is_absolute() or text.startswith("~"):
        return text
    try:
        if path.exists():
            return text
        above = path.parts[:-1]
        same = bool(above) and folder.parts[-len(above) :] == above
        beside = [folder / path, *([folder / path.name] if same else [])]
        return next((str(one) for one in beside if one.is_file()), text)
    except (OSError, ValueError):
        return text  # no path at all; whoever opens it says so
