r"""The tree that an answer is read into, and how its parts are put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from roll.rewards.maths.units import Unit


class Unreadable(ValueError):
    """What stands there is no expression that this grammar knows; says at which token."""


@dataclass(frozen=True, slots=True)
class Node:
    """An expression: an operation with its operands, or a leaf with its value."""

    op: str
    args: tuple[Node, ...] = ()
    value: Any = None


def number(value: int | Fraction, decimal: bool = False) -> Node:
    """Return the leaf of a number; `decimal` if it is written with a point, hence possibly rounded."""
    return Node("number", (), (Fraction(value), decimal))


def symbol(name: str) -> Node:
    """Return the leaf of a letter, or of what stands for one."""
    return Node("symbol", (), name)


def negative(node: Node) -> Node:
    """Return the node times -1."""
    return Node("mul", (number(-1), node))


def product(first: Node, second: Node, sign: str) -> Node:
    r"""Return `first \\times second`: of vectors and of capitals, as of sets, the order counts."""
    if is_vector(first) and is_vector(second):
        if sign == "times":
            return Node("apply", (first, second), "times")
        return Node("apply", tuple(sorted((first, second), key=repr)), "dot")
    capitals = [
        node.op == "symbol" and len(str(node.value)) == 1 and str(node.value).isupper() for node in (first, second)
    ]
    return (
        Node("apply", (first, second), "times") if sign == "times" and all(capitals) else Node("mul", (first, second))
    )


def is_vector(node: Node) -> bool:
    """Return whether a letter is marked as a vector, times a number perhaps."""
    if node.op == "mul":
        return is_vector(node.args[-1])
    return node.op == "symbol" and str(node.value).startswith("vec ")


def value_of(node: Node) -> Fraction:
    """Return a leaf's number."""
    return node.value[0]


def is_constant(node: Node) -> bool:
    """Return whether an expression has no letters, and is a single number."""
    if node.op in ("symbol", "apply", "quantity", "list", "tuple", "set", "brackets", "relation", "based", "matrix"):
        return node == symbol("±")
    return all(is_constant(child) for child in node.args)


def is_set(node: Node) -> bool:
    """Return whether a minus sign behind it takes members away."""
    return node.op in ("set", "brackets", "union", "intersection", "difference", "builder") or (
        node.op == "symbol" and str(node.value).startswith("mathbb")
    )


def ends_in_bare_application(node: Node) -> bool:
    """Return whether its last factor is a function without brackets, of which it is unclear what a slash divides."""
    while node.op == "mul":
        node = node.args[-1]
    return node.op == "call" and node.value[1] and node.value[0] not in ("ln", "log", "lg")


def is_differential(node: Node) -> bool:
    """Return whether it is `dx`, `d^2 y` or the like."""
    while node.op in ("mul", "pow"):
        node = node.args[0]
    return node.op == "symbol" and node.value in ("d", "partial")


def bracketed(opening: str, closing: str, inner: Node) -> Node:
    """Return what brackets make of their content: a group, a tuple, an interval, a vector, a rounded number."""
    if opening in ("lfloor", "lceil"):
        return Node("call", (inner,), ("floor" if opening == "lfloor" else "ceil", False))
    if opening in ("langle", "<"):
        return Node("tuple", inner.args if inner.op == "list" else (inner,))
    if inner.op != "list":
        if opening + closing == "[]":
            return Node("brackets", (inner,), "[]") if inner.op == "tuple" else inner
        if opening + closing != "()":
            raise Unreadable(repr(closing))
        return inner
    if inner.value != ",":
        raise Unreadable(repr(inner.value))
    if opening + closing == "()":
        return Node("tuple", inner.args)
    if len(inner.args) == 2 or opening + closing == "[]":
        return Node("brackets", inner.args, opening + closing)
    raise Unreadable(repr(closing))


def with_modulus(items: Sequence[Node]) -> tuple[Node, ...]:
    r"""Return `n \equiv 1, 4 \pmod 6` with the modulus and the left side for each residue."""
    last, first = items[-1], items[0]
    if last.op != "modulo" or any(item.op == "modulo" for item in items[:-1]):
        return tuple(items)
    left = first if first.op == "relation" else None
    sides = [*items[:-1], last.args[0]]
    if left is not None:
        sides = [side if side.op == "relation" else replace(left, args=(left.args[0], side)) for side in sides]
    return tuple(Node("modulo", (side, last.args[1])) for side in sides)


def quantity(node: Node, unit: Unit) -> Node:
    """Return a number with the unit behind it."""
    if unit.factor != 1:
        node = Node("mul", (node, number(unit.factor)))
    if unit.percent:
        node = Node("percent", (node,))
    unit = replace(unit, factor=Fraction(1), percent=False)
    if unit.is_empty:
        return node
    if unit.dimensions == frozenset({("degree", 1)}) and not unit.nouns:
        return Node("degrees", (node,))
    return Node("quantity", (node,), unit)


def is_part_of(first: Node, second: Node) -> bool:
    """Return whether a quantity can be said in a smaller unit behind another one: `3 hours 20 minutes`."""
    if not first.op == second.op == "quantity":
        return False
    larger, smaller = first.value, second.value
    return bool(larger.dimensions) and larger.dimensions == smaller.dimensions and larger.size > smaller.size


def together(first: Node, second: Node) -> Node:
    """Return two quantities side by side as their sum."""
    if not is_part_of(first, second):
        raise Unreadable("a second number")
    units = first.value, second.value
    smaller = Node("mul", (second.args[0], number(units[1].size / units[0].size)))
    return replace(first, args=(Node("add", (first.args[0], smaller)),))
