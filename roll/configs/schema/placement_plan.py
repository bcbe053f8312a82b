"""Which role runs on which device slots. `device_mapping` is parsed, never evaluated."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SHOWN = 8
"""Ranks that are listed of a role that has more than twice as many."""
MAX_SLOTS = 65_536
"""Longest mapping; a typing error such as `range(0, 10**9)` must not eat the memory."""

_RANGE = re.compile(r"^range\s*\(([^()]+)\)$|^list\s*\(\s*range\s*\(([^()]+)\)\s*\)$")
_SPAN = re.compile(r"^(\d+)\s*-\s*(\d+)$")


def parse_device_mapping(value: Any) -> tuple[int, ...]:
    """Global slots from a list, a number, `"[0, 1]"`, `"0-7,12"`, `"range(0, 8)"`, `"list(range(0, 8, 2))"`.

    Raises:
        ValueError: notation not understood, no slot at all, a negative slot, or a slot named twice.
    """
    slots: tuple[Any, ...]
    if isinstance(value, str):
        spans = _spans(value.strip())
        if sum(map(len, spans)) > MAX_SLOTS:
            raise ValueError(f"it names more than {MAX_SLOTS} slots")
        slots = tuple(itertools.chain.from_iterable(spans))
    else:
        slots = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    wrong = [slot for slot in slots if isinstance(slot, bool) or not isinstance(slot, int)]
    if wrong:
        raise ValueError(f"slot {wrong[0]!r} isn't a whole number")
    if not slots:
        raise ValueError("it names no slot")
    if min(slots) < 0:
        raise ValueError(f"slot {min(slots)} is negative")
    if len(set(slots)) != len(slots):
        twice = next(slot for i, slot in enumerate(slots) if slot in slots[:i])
        raise ValueError(f"slot {twice} appears twice; two ranks of one role can't share a slot")
    return slots


def _spans(text: str) -> list[range]:
    if match := _RANGE.match(text):
        arguments = match.group(1) or match.group(2)
        numbers = [_slot_number(part.strip()) for part in arguments.split(",")]
        if len(numbers) > 3 or (len(numbers) == 3 and numbers[2] == 0):
            raise ValueError(f"range({arguments}) isn't a range")
        return [range(*numbers)]
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    parts = [part.strip() for part in text.split(",")]
    if not parts[-1]:
        parts.pop()  # a trailing comma, as in Python
    return [_span(part) for part in parts]


def _span(part: str) -> range:
    span = _SPAN.match(part)
    first, last = (_slot_number(text) for text in (span.groups() if span else (part, part)))
    if last < first:
        raise ValueError(f"the span {part!r} runs backwards")
    return range(first, last + 1)


def _slot_number(text: str) -> int:
    if not re.match(r"^-?\d{1,9}$", text, re.ASCII):
        raise ValueError(f"{text!r} isn't a slot number")
    return int(text)


@dataclass(frozen=True, kw_only=True)
class PlacementPlan:
    """Slots of every rank of every role that will be started."""

    num_nodes: int
    num_gpus_per_node: int
    roles: Mapping[str, tuple[tuple[int, ...], ...]]
    """Role -> rank -> global slots."""

    @property
    def num_slots(self) -> int:
        """Slots of the whole cluster."""
        return self.num_nodes * self.num_gpus_per_node

    def node_of(self, slot: int) -> int:
        """Node that a global slot belongs to."""
        return slot // self.num_gpus_per_node

    def colocated(self) -> list[tuple[str, str]]:
        """Pairs of roles that share at least one slot and must take turns on it."""
        taken = {role: {slot for rank in ranks for slot in rank} for role, ranks in self.roles.items()}
        names = list(taken)
        return [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if taken[a] & taken[b]]

    def split_ranks(self) -> list[tuple[str, int]]:
        """Ranks whose slots lie on more than one node, which no process can own."""
        return [
            (role, index)
            for role, ranks in self.roles.items()
            for index, slots in enumerate(ranks)
            if len({self.node_of(slot) for slot in slots}) > 1
        ]

    def explain(self) -> str:
        """Return one line per role, and who shares slots with whom."""
        lines = [f"{self.num_nodes} node(s) x {self.num_gpus_per_node} slot(s) = {self.num_slots} slot(s)"]
        for role, ranks in self.roles.items():
            each = [f"{index}:{','.join(map(str, slots))}" for index, slots in enumerate(ranks)]
            where = "  ".join(each if len(each) <= 2 * _SHOWN else (*each[:_SHOWN], "...", each[-1]))
            lines.append(f"  {role:<12} {len(ranks)} rank(s), rank:slots  {where}")
        shared = ", ".join(f"{a}+{b}" for a, b in self.colocated())
        lines.append(f"  share slots: {shared or 'none'}")
        return "\n".join(lines)
