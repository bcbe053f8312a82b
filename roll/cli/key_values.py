"""`key=value` arguments of commands, values as in YAML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml


def key_values(arguments: Sequence[str], wanted: str) -> dict[str, Any]:
    """Return the arguments as a dict; raise `ValueError`, which names the argument and says what is `wanted`."""
    found: dict[str, Any] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise ValueError(f"got {argument!r}, expected key=value, {wanted}")
        found[key] = from_yaml(value, argument)
    return found


def from_yaml(text: str, source: str) -> Any:
    """Return what a YAML text says; raise `ValueError`, which names its source, if it is none."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{source} is no YAML: {error}") from None
