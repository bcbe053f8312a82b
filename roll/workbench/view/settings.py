"""The configuration that a run keeps beside its results, as flat keys."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FILE = "config.yaml"
"""In the run's folder; secrets aren't in it."""
_LARGEST = 4 * 2**20
_LONGEST_VALUE = 2000


def settings(folder: Path) -> dict[str, str]:
    """Return the values of a run's configuration by their keys, as text; empty: it has kept none that can be read."""
    import yaml

    file = folder / FILE
    try:
        if not file.resolve().is_relative_to(folder) or file.stat().st_size > _LARGEST:
            return {}
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    return dict(_flat(found, "")) if isinstance(found, Mapping) else {}


def _flat(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else str(name))
    else:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        yield key, text[:_LONGEST_VALUE]
