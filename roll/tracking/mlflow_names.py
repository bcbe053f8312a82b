"""Names of metrics and parameters in the letters that mlflow takes, each still another name.

mlflow 3.17.2 takes letters and digits of any script, `_`, `-`, `.`, space, `:` and `/`, 250 in all, and nothing that is
another path than it looks like. Whatever else a name has (of a domain, an environment's tag) is written as its code in
hexadecimal digits between colons: `math[hard]` is `math:5b:hard:5d:`.
"""

from __future__ import annotations

import hashlib
import re

LONGEST_NAME = 250
_REFUSED = re.compile(r"[^\w\-. :/]|:(?=[0-9a-f]*:)")  # a colon that would read as a code is one itself
_DIGEST = 16


def mlflow_name(name: str) -> str:
    """Return the name to write: the same where mlflow takes it, and otherwise one that no other name gets."""
    parts = _REFUSED.sub(lambda match: _code(match[0]), name).split("/")
    # Empty parts and dots alone are steps of a path.
    written = "/".join(
        "::" if not part else "".join(map(_code, part)) if part in (".", "..") else part for part in parts
    )
    if len(written) <= LONGEST_NAME:
        return written
    digest = hashlib.blake2b(name.encode(), digest_size=_DIGEST // 2).hexdigest()
    return f"{written[: LONGEST_NAME - _DIGEST - 1]}:{digest}"


def _code(letter: str) -> str:
    return f":{ord(letter):x}:"
