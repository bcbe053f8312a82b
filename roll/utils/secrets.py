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
SOUNDS_SECRET = re.compile(r"TOKEN(?!IZERS)|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
"""Names of variables that aren't handed to processes with model output: rather one too many."""
_SECRET_KEY = re.compile(
    r"^token$|(?:^|_)(?:(?:api|access|secret|private)_?key|(?:api|auth|access|hub|hf|bearer)_?token|secret"
    r"|passw(?:or)?d)$|(?:^|_)(?:authorization|cookie)$"
)
_SECRET_VARIABLE = re.compile(r"^[A-Z0-9_]*(?:KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS)$")
_IN_ADDRESS = re.compile(r"(://[^\s/:@]*):(?!\$\{)[^\s/@]+@")
"""`://user:password@` of an address, unless the password is read from the environment."""
_SHORTEST = 8
"""A shorter value stands in ordinary text by accident."""


def secret_values(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the names of secret variables by value, the longest value first."""
    environment = os.environ if environment is None else environment
    secrets = {
        value: name for name, value in environment.items() if len(value) >= _SHORTEST and SECRET_NAME.search(name)
    }
    return dict(sorted(secrets.items(), key=lambda item: -len(item[0])))


def redacted(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return the text with its variable's name in the place of each secret value, and no password in an address."""
    for value, name in secret_values(environment).items():
        if value in text:
            text = text.replace(value, f"[{name}]")
    return without_passwords(text)


def redacted_tree(value: Any, key: str = "") -> Any:
    """Return a tree of dicts and lists with its secrets out: secret variables' values, and what secret keys hold."""
    if isinstance(value, Mapping):
        return {name: redacted_tree(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_tree(item, key) for item in value]
    if isinstance(value, str):
        return "[secret]" if value and is_secret_key(key) else redacted(value)
    return value


def is_secret_key(key: str) -> bool:
    """Return whether a key of a configuration holds a secret, also a header (X-API-Key) or a variable (WANDB_API_KEY).

    `api_key` does; `api_key_env` names a variable, and `pad_token` is a token of a vocabulary.
    """
    return bool(_SECRET_VARIABLE.search(key) or _SECRET_KEY.search(key.lower().replace("-", "_")))


def without_passwords(text: str, instead: str = "[secret]") -> str:
    """Return the text with `instead` in the place of the password of each `scheme://user:password@host`."""
    return _IN_ADDRESS.sub(lambda match: f"{match[1]}:{instead}@", text) if "://" in text else text


class RedactingFormatter(logging.Formatter):
    """Formats a record, its traceback included, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return redacted(super().format(record))
