r"""Whether two answers are equal, and what was left out of account to say so."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from roll.rewards.maths.evaluation import TooHard, Undefined, context, exact, numeric
from roll.rewards.maths.forms import (
    STRUCTURES,
    as_listed,
    assigned,
    components,
    constant_last,
    counts,
    difference,
    is_inequality,
    is_name,
    items,
    last_side,
    letters,
    lone_letter,
    multiplied_out,
    oriented,
    renamed,
    sequence,
    shape,
    unit,
    walk,
    without_degrees,
    without_percent,
)
from roll.rewards.maths.grammar import parse
from roll.rewards.maths.nodes import Node, Unreadable, number
from roll.rewards.maths.regions import Unordered, region_of, same_region
from roll.rewards.maths.samples import both, close, integer_points, is_finite, is_hard, points, same_number
from roll.rewards.maths.tokens import Token, canonical_text, has_prose, tokenise
from roll.rewards.maths.units import scale, spelled_number

_CLOCK = re.compile(r"0?(\d{1,2}:\d{2}(?::\d{2})?)\s*(?:([ap])\.?\s*m\.?)?")
_DATE = re.compile(r"\d{4}-\d\d?-\d\d?|\d\d?/\d\d?/\d{4}|\d\d?\.\d\d?\.\d{4}")
_INTRODUCTION = re.compile(r"(?:\b(?:is|are|equals|be)|[=:])$")
_MAX_COMPARISONS = 400
"""Of members of two sets with each other."""
_POINTS = 6
"""Sample points at which two expressions with letters have to agree."""
_INTEGERS = frozenset("nkmjNpqr")


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer as it is compared: by the value of its expression, or else as text."""

    text: str
    """Apart from blanks and forms of writing."""
    node: Node | None
    problem: str = ""
    """Why there is no expression."""


@lru_cache(maxsize=512)
def read(answer: str) -> ParsedAnswer:
    """Return an answer's text, and its expression if all of it can be read as mathematics."""
    tokens = tokenise(answer)
    if len(tokens) > 1 and tokens[0].kind == "text" and _INTRODUCTION.search(tokens[0].text):
        tokens = tokens[1:]
    text = canonical_text(tokens)
    if not tokens:
        return ParsedAnswer(text, None, "it is empty")
    clock = _CLOCK.fullmatch(text.lower().replace(r"\ ", ""))
    if clock:
        return ParsedAnswer(
            f"{clock[1]} {clock[2]}m" if clock[2] else clock[1], _quietly(tokens)[0], "it is a time of day"
        )
    if _DATE.fullmatch("".join(token.text for token in tokens)):
        return ParsedAnswer(text, None, "it is a date")
    if _is_words(tokens):
        value = spelled_number(text)
        node = number(value) if value is not None else _quietly(tokens)[0] if re.search(r"\d", text) else None
        return ParsedAnswer(text, node, "it is words")
    return ParsedAnswer(text, *_quietly(tokens))


def _quietly(tokens: Sequence[Token]) -> tuple[Node | None, str]:
    try:
        return parse(tokens), ""
    except Unreadable as error:
        return None, f"{error} can't be read as mathematics"
    except (RecursionError, ZeroDivisionError):
        return None, "it is nested too deeply"


def _is_words(tokens: Sequence[Token]) -> bool:
    """Return whether an answer is words (`Yes`, `\\text{no}`, `January`), not a product of letters (`MN`, `mgh`)."""
    if not all(token.kind in ("word", "text") or token.text in ("(", ")", ".", "-", "'", ",", "!") for token in tokens):
        return False
    return has_prose(tuple(tokens))


@dataclass(frozen=True, slots=True)
class ComparisonResult:
    """Whether two answers are equal; `note` says what isn't obvious about it."""

    equal: bool
    note: str = ""


def same(answer: str, gold: str) -> ComparisonResult:
    """Return whether `answer` equals `gold`; raises `TooHard` when a value is too large to compute."""
    mine, theirs = read(answer), read(gold)
    if mine.text == theirs.text:
        return ComparisonResult(True)
    for side, reading in (("the answer", mine), ("the ground truth", theirs)):
        if reading.node is None:
            return ComparisonResult(False, f"compared as text: in {side}, {reading.problem}")
    assert mine.node is not None
    assert theirs.node is not None
    clocks = ["time of day" in reading.problem for reading in (mine, theirs)]
    if all(clocks) or (any(clocks) and not mine.node.op == theirs.node.op == "ratio"):
        return ComparisonResult(False, "compared as text: a time of day")
    if lone_letter(mine.node) and lone_letter(theirs.node):
        same_letter = str(mine.node.value).lower() == str(theirs.node.value).lower()
        return ComparisonResult(same_letter and str(mine.node.value).lower() in "abcde")
    units = [child.value for node in (mine.node, theirs.node) for child in walk(node) if child.op == "quantity"]
    try:
        equal = Comparison().answers(constant_last(mine.node), constant_last(theirs.node))
    except RecursionError:
        return ComparisonResult(False, "compared as text: it is nested too deeply")
    except TooHard:
        if not is_hard(theirs.node):
            raise
        return ComparisonResult(False, "compared as text: the ground truth is too large to compute")
    return ComparisonResult(
        equal, "a unit that one side lacks was left out of account" if equal and len(units) == 1 else ""
    )


class Comparison:
    """Compares two expressions from outside to inside."""

    def answers(self, answer: Node, gold: Node) -> bool:
        """Return whether two answers, or two lists of answers, are equal."""
        answer, gold = as_listed(answer), as_listed(gold)
        mine, theirs = items(answer), items(gold)
        if mine is None and theirs is None:
            return self.one(answer, gold)
        if (ordered := self._assignments(answer, gold)) is not None:
            return ordered
        regions = self._regions(answer, gold)
        if regions is not None:
            return regions
        for one, other in ((answer, gold), (gold, answer)):
            if one.op in ("list", "set") and other.op in ("tuple", "brackets", "union", "matrix"):
                return False
        mine, theirs = mine if mine is not None else (answer,), theirs if theirs is not None else (gold,)
        if len(mine) * len(theirs) > _MAX_COMPARISONS:
            raise TooHard
        return bool(mine) == bool(theirs) and self._covers(mine, theirs) and self._covers(theirs, mine, turned=True)

    def _covers(self, some: Sequence[Node], others: Sequence[Node], turned: bool = False) -> bool:
        return all(any(self.one(b, a) if turned else self.one(a, b) for b in others) for a in some)

    def _assignments(self, answer: Node, gold: Node) -> bool | None:
        """Compare `x=1, y=2` with `(1,2)`, `1, 2` or `(x,y)=(1,2)`; None if neither side is such a list."""
        mine, theirs = assigned(answer), assigned(gold)
        if mine is None and theirs is None:
            return None
        if mine is not None and theirs is not None:
            return mine.keys() == theirs.keys() and all(self.one(mine[name], theirs[name]) for name in mine)
        values = mine if mine is not None else theirs
        other = gold if mine is not None else answer
        assert values is not None
        if (
            other.op not in ("tuple", "list")
            or len(other.args) != len(values)
            or any(a.op == "relation" for a in other.args)
        ):
            return False
        ordered = [values[name] for name in sorted(values)] if other.op == "tuple" else list(values.values())
        pairs = zip(ordered, other.args, strict=True)
        return all(self.one(a, b) if mine is not None else self.one(b, a) for a, b in pairs)

    def _regions(self, answer: Node, gold: Node) -> bool | None:
        """Compare sets of real numbers, of which one is written as an interval, a union or inequalities."""
        kinds = {answer.op, gold.op}
        inequality = any(is_inequality(node) for side in (answer, gold) for node in (side, *side.args))
        reals = Node("symbol", (), "mathbb R") in (answer, gold)
        if not inequality and not reals and not kinds & {"union", "intersection", "difference", "builder", "brackets"}:
            return None
        try:
            mine, theirs = region_of(answer), region_of(gold)
        except (Unordered, Undefined):
            return None
        if mine is None or theirs is None:
            return None
        return same_region(mine, theirs)

    def one(self, answer: Node, gold: Node) -> bool:
        """Return whether two single answers are equal."""
        answer, gold = multiplied_out(answer), multiplied_out(gold)
        if answer == gold:
            return True
        if answer.op == "relation" or gold.op == "relation":
            return self._relations(answer, gold)
        if answer.op == "set" or gold.op == "set":
            if answer.op == gold.op or "list" in (answer.op, gold.op):
                return self.answers(answer, gold)
            return bool(self._regions(answer, gold))
        regions = self._regions(answer, gold)
        if regions is not None:
            return regions
        if answer.op in STRUCTURES or gold.op in STRUCTURES:
            return self._structures(answer, gold)
        return self.values(answer, gold)

    def _structures(self, answer: Node, gold: Node) -> bool:
        if answer.op in ("ratio", "modulo", "based") or gold.op in ("ratio", "modulo", "based"):
            return self._special(answer, gold)
        mine, theirs = sequence(answer), sequence(gold)
        if mine is not None and theirs is not None:
            shapes = {shape(answer), shape(gold)} - {"tuple"}
            if len(shapes) > 1 or len(mine) != len(theirs):
                return False
            return all(self.one(a, b) for a, b in zip(mine, theirs, strict=True))
        vectors = [components(node) for node in (answer, gold)]
        if mine is not None and vectors[1] is not None:
            theirs = vectors[1]
        elif theirs is not None and vectors[0] is not None:
            mine = vectors[0]
        if mine is not None and theirs is not None:
            longer = max(len(mine), len(theirs))
            padded = [(*side, *[number(0)] * (longer - len(side))) for side in (mine, theirs)]
            return longer - min(len(mine), len(theirs)) <= 1 and all(
                self.one(a, b) for a, b in zip(*padded, strict=True)
            )
        if answer.op != gold.op or answer.value != gold.value or len(answer.args) != len(gold.args):
            return False
        return all(self.one(a, b) for a, b in zip(answer.args, gold.args, strict=True))

    def _special(self, answer: Node, gold: Node) -> bool:
        """Compare ratios, residues and numerals of a base."""
        if answer.op == gold.op == "ratio" and len(answer.args) == len(gold.args):
            crossed = [
                (Node("mul", (a, gold.args[0])), Node("mul", (b, answer.args[0])))
                for a, b in zip(answer.args, gold.args, strict=True)
            ]
            return all(self.values(a, b) for a, b in crossed)
        if answer.op == gold.op == "modulo":
            modulus = exact(gold.args[1])
            if not self.values(answer.args[1], gold.args[1]):
                return False
            sides = [node.args[0] for node in (answer, gold)]
            if all(side.op == "relation" for side in sides) and not self.one(sides[0].args[0], sides[1].args[0]):
                return False
            residues = [exact(last_side(side)) for side in sides]
            if modulus and residues[0] is not None and residues[1] is not None:
                return (residues[0] - residues[1]) % modulus == 0
            return self.one(last_side(sides[0]), last_side(sides[1]))
        if answer.op == gold.op == "based":
            return answer.value == gold.value
        for one, other in ((answer, gold), (gold, answer)):
            if one.op == "ratio" and len(one.args) == 2 and other.op not in STRUCTURES:
                return other.op == "div" and self.values(Node("div", one.args), other)
        return False

    # Relations

    def _relations(self, answer: Node, gold: Node) -> bool:
        if answer.op == gold.op == "relation":
            return self._two_relations(answer, gold)
        relation, other = (answer, gold) if answer.op == "relation" else (gold, answer)
        signs: tuple[str, ...] = relation.value
        if set(signs) <= {"=", "approx"}:
            if len(signs) > 1 or is_name(relation.args[0]) or (relation.args[0].op == "tuple" and other.op == "tuple"):
                right = relation.args[-1]
                return self.answers(right, other) if relation is answer else self.answers(other, right)
            return False
        if signs == ("in",) and is_name(relation.args[0]):
            return self.one(relation.args[1], other) if relation is answer else self.one(other, relation.args[1])
        regions = self._regions(answer, gold)
        return bool(regions)

    def _two_relations(self, answer: Node, gold: Node) -> bool:
        mine, theirs = oriented(answer), oriented(gold)
        if mine.value == theirs.value and len(mine.args) == len(theirs.args):
            mine = renamed(mine, theirs)
            if all(self.one(a, b) for a, b in zip(mine.args, theirs.args, strict=True)):
                return True
        if len(mine.args) == len(theirs.args) == 2 and mine.value == theirs.value:
            sign = theirs.value[0]
            if sign in ("=", "neq", "<", "leq"):
                return self._proportional(difference(mine), difference(theirs), sign in ("<", "leq"))
        signs = {*answer.value, *gold.value}
        if signs <= {"="} and is_name(mine.args[0]) and is_name(theirs.args[0]) and mine.args[0] == theirs.args[0]:
            return self.one(mine.args[-1], theirs.args[-1])
        return bool(self._regions(answer, gold))

    def _proportional(self, answer: Node, gold: Node, positive: bool) -> bool:
        """Return whether the two differ by a constant factor, so that one is zero where the other is."""
        names = letters(answer) | letters(gold)
        if not names:
            return False
        ratios = []
        for point in points(names, 3 * _POINTS):
            try:
                a, b = numeric(answer, point), numeric(gold, point)
            except Undefined:
                continue
            if not (a and b) or not is_finite(a, b):
                return False
            ratios.append(a / b)
        if len(ratios) < 3 or not all(close(ratio, ratios[0]) for ratio in ratios):
            return False
        return not positive or (isinstance(ratios[0], context().mpf) and ratios[0] > 0)

    # Values

    def values(self, answer: Node, gold: Node) -> bool:
        """Return whether two expressions have one value, with the units behind them."""
        factor = Fraction(1)
        if answer.op == "quantity" or gold.op == "quantity":
            scaled = scale(unit(answer), unit(gold))
            if scaled is None:
                return False
            factor = scaled
            answer, gold = (node.args[0] if node.op == "quantity" else node for node in (answer, gold))
        if answer.op in STRUCTURES or gold.op in STRUCTURES:
            return self.one(answer, gold)
        percents = [
            node.op == "percent" or (node.op == "mul" and node.args[-1].op == "percent") for node in (answer, gold)
        ]
        if percents[0] != percents[1] and self._equal(without_percent(answer), without_percent(gold), factor):
            return True
        degrees = [any(child.op == "degrees" for child in walk(node)) for node in (answer, gold)]
        if degrees[0] != degrees[1] and self._equal(without_degrees(answer), without_degrees(gold), factor):
            return True
        return self._equal(answer, gold, factor)

    def _equal(self, answer: Node, gold: Node, factor: Fraction = Fraction(1)) -> bool:
        names = letters(answer) | letters(gold)
        decimal = any(node.op == "number" and node.value[1] for side in (answer, gold) for node in walk(side))
        try:
            if not names:
                return self._same_rational(answer, gold, factor, decimal)
        except Undefined:
            return False
        if factor != 1:
            answer = Node("mul", (answer, number(factor)))
        return self._agree(answer, gold, names)

    def _same_rational(self, answer: Node, gold: Node, factor: Fraction, decimal: bool) -> bool:
        try:
            mine, theirs = exact(answer), exact(gold)
        except TooHard:
            if self._same_constant(answer, gold, factor, False):
                raise  # 60 digits can't say whether they are equal, only that they aren't
            return False
        if mine is not None and theirs is not None:
            powers = any(node.op == "pow" for side in (answer, gold) for node in walk(side))
            return same_number(mine * factor, theirs, decimal, powers)
        return self._same_constant(answer, gold, factor, decimal)

    def _same_constant(self, answer: Node, gold: Node, factor: Fraction, decimal: bool) -> bool:
        ctx = context()
        has_log = any(node.op == "call" and node.value[0] == "log" for side in (answer, gold) for node in walk(side))
        for base in (1, ctx.log(10)) if has_log else (1,):
            a, b = (numeric(side, {"log": ctx.mpf(base), "±": ctx.mpf(1)}) for side in (answer, gold))
            a = a * factor.numerator / factor.denominator
            if ctx.isinf(a) or ctx.isinf(b):
                if a == b:
                    return True
            elif close(a, b):
                return True
            elif decimal and isinstance(a, ctx.mpf) and isinstance(b, ctx.mpf):
                scale_to = 10**40
                pair = [
                    Fraction(int(ctx.nint(value * scale_to)), scale_to) if ctx.mag(value) < 300 else None
                    for value in (a, b)
                ]
                if pair[0] is not None and pair[1] is not None and same_number(pair[0], pair[1], True):
                    return True
        return False

    def _agree(self, answer: Node, gold: Node, names: frozenset[str]) -> bool:
        """Return whether two expressions agree at sample points, where both have a value; for letters that count things
        (`n!`, `(-1)^n`), at integers."""
        imaginary = any(node == Node("constant", (), "i") for side in (answer, gold) for node in walk(side))
        met = 0
        differ = False
        for point in points(names, 3 * _POINTS):
            pair = both(answer, gold, point, imaginary)
            if pair is None:
                continue
            if not close(*pair):
                differ = True
                break
            met += 1
        if not differ and met >= 3:
            return True
        if not (names - {"log"} <= _INTEGERS and any(counts(node) for side in (answer, gold) for node in walk(side))):
            return False
        pairs = [both(answer, gold, point, True) for point in integer_points(names)]
        there = [pair for pair in pairs if pair is not None]
        return len(there) >= 8 and all(close(*pair) for pair in there)
