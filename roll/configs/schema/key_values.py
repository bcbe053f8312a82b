"""A configuration with other values of some keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

C = TypeVar("C")


def changed(config: C, keys: Mapping[str, Any]) -> C:
    """Return the configuration with some keys changed; not checked."""
    for key, value in keys.items():
        config = _set(config, key.split("."), value)
    return config


def _set(thing: Any, path: Sequence[str], value: Any) -> Any:
    if not path:
        return value
    if isinstance(thing, Mapping):
        return {**thing, path[0]: _set(thing.get(path[0], {}), path[1:], value)}
    return dataclasses.replace(thing, **{path[0]: _set(getattr(thing, path[0]), path[1:], value)})
