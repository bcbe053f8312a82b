"""Texts of users as parts of a metric's name."""

from __future__ import annotations

import re

_ESCAPED = re.compile(r"%(?=[0-9A-Fa-f]{2})")


def name_part(text: str) -> str:
    """Return a text, such as a domain or a reward's part, as one part of a metric's name.

    A slash, which would begin another part, and what can't be printed are written as in an address: `math/easy` is
    `math%2Feasy`. Two texts never give the same.
    """
    text = _ESCAPED.sub("%25", text) or "\0"
    return "".join(
        c if c != "/" and c.isprintable() else "".join(f"%{byte:02X}" for byte in c.encode("utf-8", "surrogatepass"))
        for c in text
    )


def name_parts(text: str, prefix: str) -> str:
    """Return the same, but for a beginning of its own that stays as it is: `env/` of `env/steps`."""
    return prefix + name_part(text[len(prefix) :]) if text.startswith(prefix) else name_part(text)
