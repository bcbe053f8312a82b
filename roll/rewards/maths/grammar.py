r"""Reading the tokens of an answer into an expression; what isn't read whole isn't read at all.

From outside to inside: answers (separated by commas, "and", "or"), relations (`x = 2`, `1 < x`), sets and sums, terms,
powers, operands. A number may be followed by a unit. Where mathematicians disagree (`a/bc`, `\sin x/2`), nothing is
read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property

from roll.rewards.maths.brackets import UPRIGHT
from roll.rewards.maths.nodes import (
    Node,
    Unreadable,
    ends_in_bare_application,
    is_constant,
    is_part_of,
    is_set,
    negative,
    number,
    product,
    quantity,
    symbol,
    together,
    value_of,
    with_modulus,
)
from roll.rewards.maths.operands import Operands
from roll.rewards.maths.tokens import Token
from roll.rewards.maths.units import is_bare_unit, read_unit

_RELATIONS = frozenset(["=", "<", ">", "leq", "geq", "neq", "approx", "in", "equiv", "simeq", "cong", "subset",
                        "subseteq", "propto", "parallel", "perp", "ll", "gg", "sim"])  # fmt: skip

_NO_UNITS = frozenset(["and", "or", "to", "is", "if", "mod", "u"])
_ENDS_OF_UNIT = (",", ";", ")", "]", "}}", "}", "newline", "rangle", "cup", "cap", ":", "pm", "&", *_RELATIONS)


def parse(tokens: Sequence[Token]) -> Node:
    """Return the expression that all tokens are; raises `Unreadable` at the first that can't be accounted for."""
    parser = ExpressionParser(tokens)
    node = parser.answers()
    if not parser.at_end():
        raise Unreadable(parser.here())
    return node


class ExpressionParser(Operands):
    """Recursive descent: each method reads what binds more tightly than the one before."""

    def answers(self) -> Node:
        """Return one answer, or the list of several."""
        items = [self._ratio()]
        joined = ""
        while not self.at_end():
            word = self._separator()
            if not word:
                break
            joined = word if word != "," else joined
            if self.at_end():
                break
            items.append(self._ratio())
            if word == "and" and is_part_of(items[-2], items[-1]):  # 3 hours and 20 minutes
                items[-2:] = [together(items[-2], items[-1])]
        if self._has_logic and any(item.op != "relation" for item in items):
            raise Unreadable("a logical sign")
        return items[0] if len(items) == 1 else Node("list", with_modulus(items), joined or ",")

    @cached_property
    def _has_logic(self) -> bool:
        """Return whether a logical sign stands anywhere; looked for once, since arguments and brackets hold answers
        too."""
        return any(token.text in ("wedge", "vee") for token in self._tokens)

    def _separator(self) -> str:
        separator = ""
        while True:
            token = self._peek()
            if token.text in (",", ";", "newline") and not self.at_end():
                self._at += 1
                separator = separator or ","
            elif token.kind in ("text", "word") and token.text.strip(" ,").lower() in ("and", "or", "&"):
                self._at += 1
                separator = token.text.strip(" ,").lower()
            elif token.text in ("wedge", "vee", "&") and token.kind != "text" and not self.at_end():
                self._at += 1
                separator = "or" if token.text == "vee" else "and"
            else:
                return separator

    def _ratio(self) -> Node:
        items = [self._relation()]
        while self._take(":") or (len(self._peek().text) == 2 and self._peek().text == "to" and self._skip()):
            items.append(self._relation())
        return items[0] if len(items) == 1 else Node("ratio", tuple(items))

    def _relation(self) -> Node:
        sides = [self._side()]
        signs: list[str] = []
        while self._peek().kind != "text" and self._peek().text in _RELATIONS and not self.at_end():
            if self._is(">") and self._depth_of_angle:
                break
            signs.append(self._next().text)
            sides.append(self._side())
        node = Node("relation", tuple(sides), tuple(signs)) if signs else sides[0]
        modulus = self._modulus()
        return node if modulus is None else Node("modulo", (node, modulus))

    def _modulus(self) -> Node | None:
        if self._take("pmod"):
            return self._argument()
        if self._is("(") and self._peek(1).text in ("bmod", "mod"):
            self._at += 2
            inner = self._sum()
            self._expect(")")
            return inner
        if self._take("bmod") or (self._peek().kind == "word" and self._take("mod")):
            return self._sum()
        return None

    def _side(self) -> Node:
        """Return a sum, or a union of sets, with the unit behind it."""
        negated = self._is("-") and self._peek(1).text in ("$", "€", "£", "¥", "₹") and self._take("-")
        currency = self._currency()
        node = negative(self._sum()) if negated else self._sum()
        node = self._with_unit(node, currency)
        while node.op == "quantity" and self._peek().kind == "number":  # 2 hours 30 minutes
            node = together(node, self._with_unit(self._sum(), ""))
        while self._is("cup", "cap", "setminus", "U") or (self._is("-") and is_set(node)):
            sign = self._next().text
            kind = {"cup": "union", "U": "union", "cap": "intersection"}.get(sign, "difference")
            node = Node(kind, (node, self._sum()))
        return node

    def _currency(self) -> str:
        if self._is("$", "€", "£", "¥", "₹"):
            return self._next().text
        if self._peek().text in ("US", "USD", "Rs") and self._peek().kind in ("word", "text"):
            self._at += 1
            self._take("$", ".")
            return "₹" if self._tokens[self._at - 1].text == "Rs" else "$"
        return ""

    def _with_unit(self, node: Node, currency: str) -> Node:
        at = self._at
        phrase = currency
        bare = node
        if node.op == "degrees" and is_constant(node):
            phrase, bare = "°", node.args[0]
        elif node.op == "mul" and node.args[-1].op == "degrees" and is_constant(node):  # -5°C
            phrase, bare = "°", replace(node, args=(*node.args[:-1], node.args[-1].args[0]))
        rest = self._unit_phrase()
        if not (currency or rest) or not is_constant(node):
            self._at = at if not rest or not is_constant(node) else self._at
            if currency:
                raise Unreadable(repr(currency))
            return node
        unit = read_unit(f"{phrase} {rest}")
        if unit is None:
            self._at = at
            return node
        return quantity(bare if phrase == "°" else node, unit)

    def _unit_phrase(self) -> str:
        """Return what stands up to the end of this answer if it may be a unit, and go there; else "" and stay."""
        at = self._at
        pieces: list[str] = []
        while not self.at_end() and (piece := self._unit_piece(first=not pieces)):
            pieces.append(piece)
        joint = self._peek().kind in ("text", "word") and self._peek().text.strip(" ,").lower() in ("and", "or")
        if pieces and (self.at_end() or self._peek().kind == "number" or self._is(*_ENDS_OF_UNIT) or joint):
            return " ".join(pieces)
        self._at = at
        return ""

    def _unit_piece(self, first: bool) -> str:
        """Take a word, power or sign of a unit; "" if none comes."""
        token = self._peek()
        if token.kind == "text" or (token.kind == "command" and token.text in UPRIGHT):
            at = self._at
            text = self._next().text if token.kind == "text" else self._upright_name()
            if text.strip(" ,").lower() in _NO_UNITS or re.search(r"[=<>(]|(?<!\^)\d", text):
                self._at = at
                return ""
            return text
        if token.kind == "word":
            follows = self._peek(1)
            if token.text in ("and", "or") and not first and follows.kind == "word" and len(follows.text) > 3:
                return self._next().text  # `72 apples and pears`
            if token.text.lower() in _NO_UNITS or (first and not self._is_unit_word()):
                return ""
            return "" if len(token.text) == 1 and token.text not in "mghslCFNJWVLKa" else self._next().text
        if self._is("^"):
            if self._peek(1).text in ("circ", "degree"):
                self._at += 2
                return "°"
            return "" if first else self._power_of_unit()
        if self._is("$", "€", "£", "¥", "₹", "¢", "%") or self._is("/") or (self._is("*", "times", ".") and not first):
            return self._next().text
        return ""

    def _is_unit_word(self) -> bool:
        """Return whether the next word is a unit; `C` and `F` behind a degree sign are, not letters to multiply by."""
        token, before = self._peek(), [self._peek(-1).text, self._peek(-2).text]
        after_degree = before[0] in ("circ", "degree") or before == ["}", "circ"] or before == ["}", "degree"]
        return (after_degree and token.text in ("C", "F")) or is_bare_unit(token.text, token.space)

    def _power_of_unit(self) -> str:
        at = self._at
        self._at += 1
        closing = self._take("{")
        sign = "-" if self._take("-") else ""
        token = self._peek()
        if token.kind == "number" and len(token.text) == 1:
            self._at += 1
            if not closing or self._take("}"):
                return f"^{sign}{token.text}"
        self._at = at
        return ""

    def _sum(self) -> Node:
        self._enter()
        terms = [self._signed(self._term)]
        while self._is("+", "-", "pm", "mp"):
            if self._is("-") and is_set(terms[0]):
                break
            terms.append(self._signed(self._term))
        self._depth -= 1
        return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    def _signed(self, inner: Callable[[], Node]) -> Node:
        if self._take("+"):
            return self._signed(inner)
        if self._take("-"):
            minus = 1
            while self._is("-", "+"):
                minus += self._next().text == "-"
            node = self._signed(inner)
            return negative(node) if minus % 2 else node
        if self._is("pm", "mp"):
            sign = symbol("±")
            return Node("mul", (sign if self._next().text == "pm" else negative(sign), self._signed(inner)))
        return inner()

    def _term(self) -> Node:
        """Return a product; what stands side by side is multiplied."""
        mixed = self._mixed_number()
        if mixed is not None and self._is("^") and self._peek(1).text not in ("circ", "degree"):
            raise Unreadable("'^'")  # of the fraction, or of all
        node = mixed or self._power()
        divided_by: Node | None = None
        while True:
            if self._is("*", "times") or self._times_ahead():
                sign = self._next().text
                node, divided_by = product(node, self._signed(self._power), sign), None
            elif self._is("/"):
                at = self._at
                self._at += 1
                if self._peek().kind in ("word", "text") and not self._starts_operand():
                    self._at = at
                    return node
                if ends_in_bare_application(node) and not self._is_function():
                    raise Unreadable("'/'")
                divided_by = self._power()
                node = Node("div", (node, divided_by))
            elif self._starts_operand() or self._power_of_number_ahead():
                if divided_by is not None and divided_by.op != "number":
                    raise Unreadable(self.here())  # a/bc
                if self._unit_starts(node):
                    return node
                node = Node("mul", (node, self._power()))
            else:
                return node

    def _times_ahead(self) -> bool:
        """Return whether `x` stands between numbers as a sign: `1.5 x 10^3`."""
        return (
            self._peek().text == "x" and self._peek().space and self._peek(-1).kind == "number"
            and self._peek(1).kind == "number" and self._peek(1).space
        )  # fmt: skip

    def _power_of_number_ahead(self) -> bool:
        """Return whether `2^n` follows brackets: `n(n+1)2^{n-3}`."""
        return self._peek(-1).text == ")" and self._peek().kind == "number" and self._peek(1).text == "^"

    def _unit_starts(self, node: Node) -> bool:
        """Return whether what comes next, up to the end of the answer, is a unit of the number before it."""
        token = self._peek()
        if token.kind not in ("word", "command") or (token.kind == "command" and token.text not in UPRIGHT):
            return False
        if token.kind == "word" and not self._is_unit_word():
            return False
        if not is_constant(node):
            return False
        at = self._at
        phrase = self._unit_phrase()
        self._at = at
        unit = read_unit(f"° {phrase}" if node.op == "degrees" else phrase)
        return bool(phrase) and unit is not None

    def _mixed_number(self) -> Node | None:
        """Return `1 1/2` or `1\\frac{1}{2}`; None when something else stands there."""
        integer = self._peek()
        if integer.kind != "number" or not integer.text.isdigit():
            return None
        if self._peek(1).kind == "number" and self._peek(2).text == "/" and self._peek(3).kind == "number":
            parts = [integer.text, self._peek(1).text, self._peek(3).text]
            if not all(part.isdigit() for part in parts) or not 0 < int(parts[1]) < int(parts[2]):
                raise Unreadable(repr(self._peek(1).text))
            self._at += 4
            return number(int(parts[0]) + Fraction(int(parts[1]), int(parts[2])))
        if self._peek(1).text == "frac" and self._peek(1).kind == "command":
            at = self._at
            self._at += 1
            fraction = self._operand()
            over, under = fraction.args if fraction.op == "div" else (fraction, fraction)
            if fraction.op == "div" and over.op == under.op == "number":
                value = Fraction(value_of(over), value_of(under)) if value_of(under) else Fraction(2)
                if not 0 < value < 1 or value * value_of(under) % 1:
                    raise Unreadable(f"{integer.text}\\frac")  # 2\frac{3}{2}: a product or a sum
                return self._postfix(number(int(integer.text) + value))
            self._at = at
        return None
