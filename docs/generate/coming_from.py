"""The tables of docs/coming_from.md: keys of other projects one by one, from `roll/workbench/migrate`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby

from roll.configs.parsing.key_hints import OTHER_PIPELINE_KEYS
from roll.workbench.migrate import peers
from roll.workbench.migrate.table import PeerKey, is_earlier, systems

_ORDER = ("verl", "verl_sft", "verl_generation", "verl_evaluation", "trl", "openrlhf", "roll")
_FATES = {"translated": "=", "decided": "choice", "dead": "not needed", "quiet": "not here", "absent": "**asks**"}


def tables() -> str:
    """Return a table for each project, and one of keys that another pipeline has."""
    parts: list[str] = []
    for name in _ORDER:
        release = peers.release(name) or systems()[name].release
        parts += [f"\n## {f'{systems()[name].name} {release}'.strip()}\n", *_table(name)]
    parts += ["\n## In another pipeline\n", "| pipeline | written | the answer |", "|---|---|---|"]
    parts += [
        f"| `{pipeline}` | `{key}` | {_escaped(hint)} |"
        for pipeline, hints in OTHER_PIPELINE_KEYS.items()
        for key, hint in hints.items()
    ]
    return "\n".join(parts) + "\n"


def _table(name: str) -> Iterator[str]:
    groups = {title: [row for row in rows if row.key != "**"] for title, rows in systems()[name].groups.items()}
    if same := dict.fromkeys(row.key for rows in groups.values() for row in rows if _is_same(row)):
        yield "Called the same here: " + ", ".join(f"`{key}`" for key in same) + ".\n"
    yield f"| {systems()[name].name} | fate | here |"
    yield "|---|---|---|"
    for title, rows in groups.items():
        changed = [row for row in rows if not _is_same(row)]
        if len(groups) > 1 and changed:
            yield f"| **{title}** | | |"
        for (fate, ours), alike in groupby(changed, key=lambda row: (_FATES[row.fate], _ours(row))):
            keys = ", ".join(f"`{row.key}`{' *' * is_earlier(name, row)}" for row in alike)
            yield f"| {keys} | {fate} | {ours} |"


def _is_same(row: PeerKey) -> bool:
    return row.fate == "translated" and row.to == (row.key,) and not row.note


def _ours(row: PeerKey) -> str:
    keys = " and ".join(f"`{key}`" for key in row.to)
    values = ", ".join(f"{theirs} is {ours}" for theirs, ours in row.values.items() if theirs not in (None, ours))
    note = _escaped(row.note or values)
    if row.fate in ("translated", "decided"):
        return f"{keys}{f': {note}' if note else ''}"
    return f"{note}{f' (see {keys})' if keys else ''}"


def _escaped(hint: str) -> str:
    """Return a hint as the cell of a table, with `<tag>` as text and no emphasis by stars."""
    return re.sub(r"[<*|]", lambda sign: "\\" + sign[0], hint)
