"""DeepSeek: marks around calls, and JSON, in a fence until V3.1.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
```json
{"x": 1}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from roll.envs.tools.parsing.base import NAME, BadCall, Extraction, read_arguments, read_marked, skip_space
from roll.types.chat import ToolSpec

_ALL_OPEN, _ALL_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_OPEN, _BETWEEN, _CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCED = re.compile(r"([^\n]{1,128})\n```json\n?")
_MAX_HEAD = 160
_FORM = f"write {_ALL_OPEN}{_OPEN}...{_CLOSE}{_ALL_CLOSE} as you were told"


def parse(text: str, tools: Sequence[ToolSpec]) -> Extraction:  # noqa: ARG001
    """Read the calls off a response."""
    extracted = read_marked(text, _OPEN, _CLOSE, _FORM, _call)
    if extracted.calls:
        extracted.content = [piece.replace(_ALL_OPEN, "").replace(_ALL_CLOSE, "") for piece in extracted.content]
    return extracted


def _call(text: str, at: int) -> tuple[str, str, int]:
    """Return name, arguments and end of the call whose head begins at `at`. Raises `BadCall`."""
    between = text.find(_BETWEEN, at, at + _MAX_HEAD)
    if between < 0:
        raise BadCall("bad_call", f"the call has no {_BETWEEN}", at)
    name, at = text[at:between].strip(), skip_space(text, between + len(_BETWEEN))
    fenced = None if text[at : at + 1] == "{" else _FENCED.match(text, at)
    if fenced is not None:
        name, at = fenced.group(1).strip(), skip_space(text, fenced.end())
    if not NAME.fullmatch(name):
        raise BadCall("bad_call", "a call has no name of letters, digits and _.:/-", at)
    arguments, at = read_arguments(text, at)
    at = skip_space(text, at)
    at = skip_space(text, at + 3) if text.startswith("```", at) else at
    return name, arguments, at + len(_CLOSE) if text.startswith(_CLOSE, at) else at
