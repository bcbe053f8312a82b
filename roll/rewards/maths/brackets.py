r"""What encloses: brackets, braces, bars, matrices, and commands that mark a name."""

from __future__ import annotations

import re
from fractions import Fraction

from roll.rewards.maths.cursor import Cursor
from roll.rewards.maths.nodes import Node, Unreadable, bracketed, number, symbol
from roll.rewards.maths.units import words

VECTORS = frozenset(["mathbf", "boldsymbol", "bm", "vec", "hat", "overrightarrow", "widehat", "pmb", "symbf"])
MARKS = frozenset(words("overline bar tilde widetilde dot ddot mathcal mathbb mathfrak mathscr underline check breve"))
UPRIGHT = frozenset(["mathrm", "operatorname", "rm", "mathit", "mathsf", "mathnormal"])
_MATRICES = frozenset(["pmatrix", "bmatrix", "matrix", "vmatrix", "Bmatrix", "smallmatrix", "array", "Vmatrix"])
_CLOSING = {
    "(": (")", "]", "["),
    "[": ("]", ")", "["),
    "]": ("]", "["),
    "{{": ("}}",),
    "{": ("}",),
    "lfloor": ("rfloor",),
    "lceil": ("rceil",),
    "langle": ("rangle",),
    "<": (">",),
}


class Brackets(Cursor):
    """Reading up to what closes."""

    def _group(self) -> Node:
        """Return what stands in round brackets or braces: braces with commas are a set."""
        opening = self._next().text
        self._enter()
        if opening == "{" and self._take("}"):
            self._depth -= 1
            return Node("set")
        bars, self._bars = self._bars, 0
        node = self.answers()
        self._bars = bars
        self._expect(*_CLOSING[opening][:1])
        self._depth -= 1
        if node.op == "list" and opening == "{":
            return Node("set", node.args)
        if node.op == "list":
            return Node("tuple", node.args)
        return node

    def _delimited(self) -> Node:
        opening = self._next().text
        self._enter()
        bars, self._bars = self._bars, 0
        self._depth_of_angle += opening == "<"
        if opening == "{{":
            node = self._set()
        elif self._is(*_CLOSING[opening]):
            raise Unreadable(self.here())
        else:
            square, self._square = self._square, int(opening in ("[", "]"))
            inner = self.answers()
            self._square = square
            closing = self._expect(*_CLOSING[opening])
            node = bracketed("(" if opening == "]" else opening, ")" if closing == "[" else closing, inner)
        self._depth_of_angle -= opening == "<"
        self._bars = bars
        self._depth -= 1
        return node

    def _set(self) -> Node:
        if self._take("}}"):
            return Node("set")
        inner = self.answers() if not self._condition_ahead() else self._relation()
        if self._peek().kind != "text" and self._take("|", "mid", ":"):
            self._bars = 0
            condition = self.answers()
            self._expect("}}")
            return Node("builder", (inner, condition))
        self._expect("}}")
        items = inner.args if inner.op == "list" else (inner,)
        return Node("set", items)

    def _condition_ahead(self) -> bool:
        """Return whether `{x | ...}` or `{x : ...}` follows rather than `{1, 2}`."""
        for token in self._tokens[self._at :]:
            if token.text in ("|", "mid", ":") and token.kind != "text":
                self._bars += token.text == "|"
                return True
            if token.text in (",", "}}", "("):
                return False
        return False

    def _absolute(self) -> Node:
        self._next()
        self._bars += 1
        self._enter()
        inner = self._sum()
        self._depth -= 1
        self._bars -= 1
        self._expect("|")
        return Node("call", (inner,), ("abs", False))

    def _matrix(self) -> Node:
        name = self._environment()
        if name not in _MATRICES:
            raise Unreadable(repr(name))
        if name == "array" and self._is("{"):
            self._skip_group()
        rows: list[list[Node]] = [[]]
        while not self._is("end"):
            if self._take("newline"):
                rows.append([])
            elif self._take("&") or self._take("hline"):
                pass
            else:
                rows[-1].append(self._with_unit(self._sum(), ""))
        self._next()
        self._environment()
        rows = [row for row in rows if row]
        if not rows or len({len(row) for row in rows}) != 1:
            raise Unreadable(repr(name))
        node = Node("matrix", tuple(Node("row", tuple(row)) for row in rows))
        return Node("call", (node,), ("det", False)) if name == "vmatrix" else node

    def _environment(self) -> str:
        self._expect("{")
        name = self._next().text
        self._take("*")
        self._expect("}")
        return name

    def _marked(self, command: str) -> Node:
        r"""Return `\mathbf{i}`, `\vec{v}`, `\overline{z}`: a name of its own; a number in bold is the number."""
        inside = self._name()
        plain = re.sub(
            "|".join(VECTORS | {"mathrm", "imath", "jmath"}),
            lambda m: m.group()[0] if m.group() in ("imath", "jmath") else "",
            inside,
        )
        if command in VECTORS and re.fullmatch(r"\d+(\.\d+)?", plain):
            return number(Fraction(plain), "." in plain)
        if not plain or any(character.isdigit() for character in plain):
            raise Unreadable(repr("\\" + command))
        return symbol(f"{'vec' if command in VECTORS else command} {plain}")

    def _upright_name(self) -> str:
        self._next()
        return self._name() if self._is("{") else ""

    def _conditional(self, name: str) -> Node:
        self._expect("(")
        bars, self._bars = self._bars, 1
        first = self.answers()
        self._expect("|")
        second = self.answers()
        self._expect(")")
        self._bars = bars
        return Node("apply", (first, second), f"{name}|")
