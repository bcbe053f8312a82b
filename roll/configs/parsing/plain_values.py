"""What no value may be, whichever key it has: a number that is none, a path that no file system takes, a deep tree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

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
