r"""Forms of an expression: as a list of answers, with other letters, without percent signs, and what it looks like."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from roll.rewards.maths.evaluation import TooHard, Undefined, exact
from roll.rewards.maths.nodes import Node, number, symbol
from roll.rewards.maths.units import Unit, words

STRUCTURES = frozenset(
    words("tuple brackets set matrix row union intersection difference builder ratio modulo based list relation")
)
_TURNED = {">": "<", "geq": "leq", "approx": "="}


def walk(node: Node) -> Iterator[Node]:
    """Give a node and everything below it."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(node.args)


def lone_letter(node: Node) -> bool:
    """Return whether an answer is a single letter."""
    return node.op == "symbol" and len(str(node.value)) == 1


def constant_last(node: Node) -> Node:
    """Return an expression whose constant of integration is called C: a letter C or c that is a term of its own."""
    if node.op == "relation" and len(node.args) == 2:
        return replace(node, args=(node.args[0], constant_last(node.args[1])))
    if node.op != "add":
        return node
    names = [child.value for child in walk(node) if child.op == "symbol"]
    if ("C" in names) == ("c" in names) or names.count("c") + names.count("C") != 1:
        return node
    return replace(node, args=tuple(symbol("C") if child == symbol("c") else child for child in node.args))


def as_listed(node: Node) -> Node:
    """Return `a \\pm b` as the list of both, and a list of lists as one."""
    if node.op in ("list", "set"):
        items: list[Node] = []
        for child in node.args:
            child = as_listed(child)
            items.extend(child.args if child.op == "list" else (child,))
        return replace(node, args=tuple(items))
    if node.op == "relation" and node.value == ("=",):
        right = as_listed(node.args[1])
        if right.op == "list":
            return Node("list", tuple(replace(node, args=(node.args[0], item)) for item in right.args), "or")
        return node
    if any(child == symbol("±") for child in walk(node)):
        return Node("list", tuple(substituted(node, "±", number(sign)) for sign in (1, -1)), ",")
    return node


def multiplied_out(node: Node) -> Node:
    """Return a number times a matrix or a tuple as the matrix or the tuple."""
    if node.op == "div" and node.args[0].op in ("matrix", "tuple"):
        node = Node("mul", (Node("div", (number(1), node.args[1])), node.args[0]))
    if node.op != "mul" or node.args[0].op in STRUCTURES or node.args[1].op not in ("matrix", "tuple"):
        return node
    factor, inside = node.args
    if inside.op == "tuple":
        return replace(inside, args=tuple(Node("mul", (factor, child)) for child in inside.args))
    rows = [replace(row, args=tuple(Node("mul", (factor, cell)) for cell in row.args)) for row in inside.args]
    return replace(inside, args=tuple(rows))


def items(node: Node) -> tuple[Node, ...] | None:
    """Return the answers of a list or a set, None for a single answer."""
    return node.args if node.op in ("list", "set") else None


def assigned(node: Node) -> dict[str, Node] | None:
    """Return the values of different letters: `x=1, y=2` or `(x,y)=(1,2)`."""
    if node.op == "relation" and node.value == ("=",) and node.args[0].op == node.args[1].op == "tuple":
        if len(node.args[0].args) == len(node.args[1].args) and all(
            child.op == "symbol" for child in node.args[0].args
        ):
            return {str(a.value): b for a, b in zip(node.args[0].args, node.args[1].args, strict=True)}
        return None
    if node.op != "list" or len(node.args) < 2:
        return None
    if not all(
        child.op == "relation" and child.value == ("=",) and child.args[0].op == "symbol" for child in node.args
    ):
        return None
    values = {str(child.args[0].value): child.args[1] for child in node.args}
    return values if len(values) == len(node.args) else None


def sequence(node: Node) -> tuple[Node, ...] | None:
    """Return the entries of a tuple, of a list in brackets, of a row or of a column."""
    if node.op in ("tuple", "brackets"):
        return node.args
    if node.op == "matrix":
        if len(node.args) == 1:
            return node.args[0].args
        if all(len(row.args) == 1 for row in node.args):
            return tuple(row.args[0] for row in node.args)
    return None


def shape(node: Node) -> str:
    """Return what two sequences have to share: rows aren't columns, nor closed intervals open ones."""
    if node.op == "matrix":
        return "row" if len(node.args) == 1 else "column"
    if node.op == "brackets":
        return f"brackets {node.value}" if len(node.args) == 2 else "tuple"
    return "tuple"


def components(node: Node) -> tuple[Node, ...] | None:
    r"""Return the components of `2\mathbf{i}-\mathbf{j}` by its three unit vectors."""
    names = letters(node)
    units = ("vec i", "vec j", "vec k")
    if not names or not names <= set(units):
        return None
    at_zero = {name: number(0) for name in units}
    parts = tuple(with_letters(node, at_zero | {name: number(1)}) for name in units)
    return parts if "vec k" in names else parts[:2]


def substituted(node: Node, name: str, value: Node) -> Node:
    """Return an expression with `value` in place of a letter."""
    return with_letters(node, {name: value})


def with_letters(node: Node, values: dict[str, Node]) -> Node:
    """Return an expression with other values in place of letters."""
    if node.op == "symbol":
        return values.get(str(node.value), node)
    return replace(node, args=tuple(with_letters(child, values) for child in node.args)) if node.args else node


def without_percent(node: Node) -> Node:
    """Return a percentage without its sign."""
    if node.op == "percent":
        return node.args[0]
    if node.op == "mul" and node.args[-1].op == "percent":
        return replace(node, args=(node.args[0], node.args[1].args[0]))
    return node


def without_degrees(node: Node) -> Node:
    """Return an expression whose degrees are plain numbers, but for those that a function takes."""
    if node.op == "degrees":
        return node.args[0]
    if node.op == "call":
        return node
    return replace(node, args=tuple(map(without_degrees, node.args))) if node.args else node


def unit(node: Node) -> Unit:
    """Return the unit of a quantity, or none."""
    return node.value if node.op == "quantity" else Unit()


def last_side(node: Node) -> Node:
    """Return what an equation comes to; another node is itself."""
    return node.args[-1] if node.op == "relation" else node


def is_name(node: Node) -> bool:
    """Return whether the left side of an equation only says what the right side is: `x`, `f(x)`, `AB`, `a+b`,
    `P(2)`."""
    if node.op in ("symbol", "apply", "constant"):
        return True
    if node.op in ("add", "mul"):
        return all(is_name(child) for child in node.args)
    return node.op == "call" and node.value[0] in (
        "abs",
        "det",
        "gcd",
        "lcm",
        "max",
        "min",
        "arg",
        "deg",
        "dim",
        "rank",
        "tr",
    )


def is_inequality(node: Node) -> bool:
    """Return whether a relation says which numbers are allowed."""
    return node.op == "relation" and bool({"<", ">", "leq", "geq", "neq", "in"} & set(node.value))


def oriented(node: Node) -> Node:
    """Return a relation that is written with `<` or `leq`, from left to right."""
    signs: tuple[str, ...] = node.value
    if all(sign in (">", "geq") for sign in signs):
        return Node("relation", node.args[::-1], tuple(_TURNED[sign] for sign in signs[::-1]))
    return replace(node, value=tuple("=" if sign == "approx" else sign for sign in signs))


def renamed(answer: Node, gold: Node) -> Node:
    """Return `f(t) = t^2` with the letters of `f(x) = x^2`; `y =` is `f(x) =` as well."""
    mine, theirs = answer.args[0], gold.args[0]
    variables = [node.op == "symbol" for node in (*mine.args, *theirs.args)]
    if mine.op == theirs.op == "apply" and len(mine.args) == len(theirs.args) and all(variables):
        return with_letters(answer, {str(a.value): b for a, b in zip(mine.args, theirs.args, strict=True)})
    if (
        {mine.op, theirs.op} == {"symbol", "apply"}
        and "y" in (mine.value, theirs.value)
        and "f" in (mine.value, theirs.value)
    ):
        return replace(answer, args=(theirs, *answer.args[1:]))
    return answer


def difference(node: Node) -> Node:
    """Return the left side minus the right side."""
    return Node("add", (node.args[0], Node("mul", (number(-1), node.args[1]))))


def letters(node: Node) -> frozenset[str]:
    """Return the letters that an expression depends on; `log` without a base is one, for its base."""
    names = {str(child.value) for child in walk(node) if child.op == "symbol"}
    return frozenset(names)


def counts(node: Node) -> bool:
    """Return whether an expression asks for whole numbers: `n!`, `(-1)^n`, `\\cos(n\\pi)`."""
    return (
        node.op in ("factorial", "factorial2", "binomial")
        or (node.op == "pow" and exact_or_none(node.args[0]) is not None and bool(letters(node.args[1])))
        or (node.op == "call" and node.value[0] in ("sin", "cos", "tan", "floor", "ceil", "gcd"))
    )


def exact_or_none(node: Node) -> Fraction | None:
    """Return the rational number that an expression is, or None."""
    try:
        return exact(node)
    except (Undefined, TooHard):
        return None
