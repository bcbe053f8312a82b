"""Keep keys and tokens out of what is written: values of variables whose name says that they are secret."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import Any

SECRET_NAME = re.compile(
    r"(?i)(?:^|_)(?:api_?key|access_?key|secret|token|passw(?:or)?d|passphrase|credentials?|private_?key|auth|key)(?:_|$)"
)
"""Names of variables (and of keys in a configuration) whose values are secret."""
_SHORTEST = 8
"""A shorter value stands in ordinary text by accident."""


def secret_values(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the names of secret variables by value, the longest value first."""
    environment = os.environ if environment is None else environment
    found = {value: name for name, value in environment.items() if len(value) >= _SHORTEST and SECRET_NAME.search(name)}
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def redacted(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return the text with the name of its variable in the place of each secret value."""
    for value, name in secret_values(environment).items():
        if value in text:
            text = text.replace(value, f"[{name}]")
    return text


def redacted_tree(value: Any, key: str = "") -> Any:
    """Return a tree of dicts and lists with its secrets out: secret variables' values, and what secret keys hold."""
    if isinstance(value, Mapping):
        return {name: redacted_tree(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_tree(item, key) for item in value]
    if isinstance(value, str):
        return "[secret]" if value and _holds_a_secret(key) else redacted(value)
    return value


def _holds_a_secret(key: str) -> bool:
    """`api_key` does; `api_key_env` names a variable, and `pad_token` is a token of a vocabulary."""
    names = r"(?:api|access|private|secret)_?key|secret|passw(?:or)?d|(?:access|auth|hf)_?token|authorization|cookie"
    return bool(re.search(rf"(?i)(?:^|_)(?:{names})$", key.replace("-", "_")))  # also headers: X-API-Key


class RedactingFormatter(logging.Formatter):
    """Formats a record, its traceback included, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return redacted(super().format(record))
