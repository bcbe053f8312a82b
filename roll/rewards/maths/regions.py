r"""Sets of real numbers: intervals, unions and inequalities in one variable as a list of intervals in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from roll.rewards.maths.evaluation import context, numeric
from roll.rewards.maths.nodes import Node
from roll.rewards.maths.samples import close, is_finite


class Unordered(ValueError):
    """A bound that isn't a real number, such as a letter."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The numbers between two bounds, with or without each."""

    low: Any
    high: Any
    closed_low: bool
    closed_high: bool


Region: TypeAlias = tuple[Interval, ...]


def region_of(node: Node) -> Region | None:
    """Return the real numbers that an answer describes, or None if it describes something else.

    Raises:
        Unordered: a bound isn't a real number.
    """
    if node.op in ("tuple", "brackets") and len(node.args) == 2:
        ends = str(node.value) if node.op == "brackets" else "()"
        low, high = map(_bound, node.args)
        return _merged([Interval(low, high, ends[0] == "[", ends[1] == "]")])
    if node.op in ("set", "list") and not any(child.op in ("relation", "tuple", "set") for child in node.args):
        if node.op == "list" and any(child.op in ("brackets", "union") for child in node.args):
            return _united([region_of(child) for child in node.args])
        return _merged([Interval(value, value, True, True) for value in map(_bound, node.args)])
    if node.op == "symbol" and node.value == "mathbb R":
        return (Interval(-context().inf, context().inf, False, False),)
    if node.op == "relation":
        return _of_relation(node)
    if node.op == "list" and all(child.op == "relation" for child in node.args):
        return _of_list(node)
    if node.op == "builder" and node.args[0].op in ("symbol", "relation"):
        head = node.args[0]
        name = head if head.op == "symbol" else head.args[0]
        return region_of(node.args[1]) if name == _variable(node.args[1]) else None
    if node.op in ("union", "intersection", "difference"):
        first, second = (region_of(child) for child in node.args)
        if first is None or second is None:
            return None
        if node.op == "union":
            return _merged([*first, *second])
        other = _complement(second) if node.op == "difference" else second
        return _intersection(first, other)
    return None


def _bound(node: Node) -> Any:
    try:
        value = numeric(node, {})
    except KeyError:
        raise Unordered from None
    if not isinstance(value, context().mpf):
        raise Unordered
    return value


def _variable(node: Node) -> Node | None:
    """Return the letter that inequalities are about, if it is one."""
    relations = node.args if node.op == "list" else (node,)
    names = {
        child for relation in relations if relation.op == "relation" for child in relation.args if child.op == "symbol"
    }
    return names.pop() if len(names) == 1 else None


def _of_relation(node: Node) -> Region | None:
    """Return the numbers for which `1 < x \\leq 2`, `x \\neq 3` or `x \\in A` holds."""
    signs: tuple[str, ...] = node.value
    name = _variable(node)
    if name is None:
        return None
    if signs == ("in",):
        return region_of(node.args[1]) if node.args[0] == name else None
    if signs == ("neq",) and node.args[0] == name:
        value = _bound(node.args[1])
        return _complement((Interval(value, value, True, True),))
    if signs == ("=",) and node.args[0] == name:
        value = _bound(node.args[1])
        return (Interval(value, value, True, True),)
    if not set(signs) <= {"<", ">", "leq", "geq"} or sum(child == name for child in node.args) != 1:
        return None
    region: Region = (Interval(-context().inf, context().inf, False, False),)
    at = node.args.index(name)
    if len({sign in ("<", "leq") for sign in signs}) != 1:
        return None
    for i in range(len(signs)):
        if at not in (i, i + 1):  # `0 < 1 < x`: what isn't about x
            return None
        bound, closed = _bound(node.args[i + 1 if i == at else i]), signs[i] in ("leq", "geq")
        below = (signs[i] in ("<", "leq")) == (i == at)
        side = (
            Interval(-context().inf, bound, False, closed) if below else Interval(bound, context().inf, closed, False)
        )
        region = _intersection(region, (side,))
    return region


def _of_list(node: Node) -> Region | None:
    """Return `x < 1 or x > 3` as a union, and with "and" as what both allow."""
    if _variable(node) is None:
        return None
    parts = [_of_relation(child) for child in node.args]
    both: Region = parts[0] or ()
    for part in parts[1:]:
        both = _intersection(both, part or ())
    if any(part is None for part in parts):
        return None
    if node.value == "and" or (node.value == "," and both):
        return both
    return _united(parts)


def _united(parts: list[Region | None]) -> Region | None:
    if any(part is None for part in parts):
        return None
    return _merged([interval for part in parts if part is not None for interval in part])


def _is_empty(interval: Interval) -> bool:
    if interval.low == interval.high:
        return not (interval.closed_low and interval.closed_high) or not context().isfinite(interval.low)
    return bool(interval.low > interval.high)


def _merged(intervals: list[Interval]) -> Region:
    """Return intervals in order, those that touch as one."""
    inf = context().inf
    there = [
        Interval(i.low, i.high, i.closed_low and i.low != -inf, i.closed_high and i.high != inf)
        for i in intervals
        if not _is_empty(i)
    ]
    there.sort(key=lambda i: (i.low, not i.closed_low))
    merged: list[Interval] = []
    for interval in there:
        last = merged[-1] if merged else None
        if (
            last is None
            or interval.low > last.high
            or (interval.low == last.high and not (interval.closed_low or last.closed_high))
        ):
            merged.append(interval)
            continue
        if interval.high > last.high or (interval.high == last.high and interval.closed_high):
            merged[-1] = Interval(last.low, interval.high, last.closed_low, interval.closed_high)
    return tuple(merged)


def _complement(region: Region) -> Region:
    inf = context().inf
    low, closed = -inf, False
    gaps = []
    for interval in region:
        gaps.append(Interval(low, interval.low, closed, not interval.closed_low))
        low, closed = interval.high, not interval.closed_high
    gaps.append(Interval(low, inf, closed, False))
    return _merged(gaps)


def _intersection(first: Region, second: Region) -> Region:
    common = []
    for a in first:
        for b in second:
            low, closed_low = max((a.low, not a.closed_low), (b.low, not b.closed_low))
            high, open_high = min((a.high, a.closed_high), (b.high, b.closed_high))
            common.append(Interval(low, high, not closed_low, open_high))
    return _merged(common)


def same_region(answer: Region, gold: Region) -> bool:
    """Return whether two sets have the same intervals, with the same bounds in or out."""
    if len(answer) != len(gold):
        return False
    for mine, theirs in zip(answer, gold, strict=True):
        if (mine.closed_low, mine.closed_high) != (theirs.closed_low, theirs.closed_high):
            return False
        for a, b in ((mine.low, theirs.low), (mine.high, theirs.high)):
            if a != b and not (is_finite(a, b) and close(a, b)):
                return False
    return True
