"""What `$` stands for in a shell script: variables, arrays, `${...}` with a default, arithmetic of whole numbers."""

from __future__ import annotations

import ast
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

NAME = re.compile(r"[A-Za-z_]\w*")
_OF_THE_USER = ("HOME", "USER", "PWD")
"""Variables of the environment that a path may begin with: ours reads them when the run starts."""
MAX_CHARACTERS = 64 * 2**20
"""Characters that all expansions of a script together may give."""


@dataclass
class Word:
    """A word of a command."""

    text: str = ""
    unexpanded: tuple[str, ...] = ()
    """Parts of it that would have to be run or worked out, as the script writes them."""
    line: int = 0


@dataclass
class Script:
    """What a script says."""

    commands: list[list[Word]] = field(default_factory=list)
    variables: dict[str, list[Word]] = field(default_factory=dict)
    """Values by name; of an array one by element."""
    documents: list[tuple[str, str, Word]] = field(default_factory=list)
    """Here-documents: the file that each is written to, the text in the script, and with its variables filled in."""
    notes: list[str] = field(default_factory=list)
    conditions: dict[str, str] = field(default_factory=dict)
    """Of variables that are set under a condition: which value was taken."""
    used: set[str] = field(default_factory=set)
    """Variables that something refers to."""
    functions: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Bodies of functions, with their line."""
    called: set[str] = field(default_factory=set)
    room: int = MAX_CHARACTERS

    def spend(self, characters: int) -> None:
        """Count what an expansion gives; raise `TooMuch` where a script's become too many."""
        self.room -= characters
        if self.room < 0:
            raise TooMuch(f"its variables grow beyond {MAX_CHARACTERS:,} characters once they are filled in")


class TooMuch(ValueError):
    """A script whose words grow without end."""


class Expansions(ABC):
    """Reads a script's text from `_at` on, and gives the values of the expansions that begin there."""

    def __init__(self, text: str, script: Script, line: int) -> None:
        self._text, self._at, self._script = text, 0, script
        self._counted, self._lines = 0, line

    @abstractmethod
    def _expanded(self, text: str) -> Word:
        """Return a text with its own variables and quotes expanded."""

    def _line(self) -> int:
        self._lines += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        return self._lines

    def _until(self, sign: str) -> str:
        end = self._text.find(sign, self._at + 1)
        if end < 0:
            raise ValueError(f"line {self._line()}: a quote {sign} isn't closed")
        text = self._text[self._at + 1 : end]
        self._at = end + 1
        return text

    def _expansion(self) -> tuple[list[Word], bool]:
        """Return what a `$` or a backquote stands for, and whether that are elements of an array."""
        text, start = self._text, self._at
        if text[start] == "`":
            return _stopped(f"`{self._until('`')}`"), False
        if text.startswith("$(", start):
            raw = self._balanced("()")
            number = self._number(raw[3:-2]) if raw.startswith("$((") and raw.endswith("))") else None
            return (_stopped(raw) if number is None else [Word(str(number))]), False
        if text.startswith("${", start):
            return self._braces(self._balanced("{}")[2:-1])
        if match := NAME.match(text, start + 1):
            self._at = match.end()
            return self._variable(match.group()), False
        sign = text[start + 1 : start + 2].replace("*", "@")
        self._at += 2 if sign and sign in "@*#?$!-0123456789" else 1
        raw = text[start : self._at]
        if sign and sign in self._script.variables:
            return self._script.variables[sign], sign == "@"
        return (_stopped(raw) if len(raw) > 1 else [Word(raw)]), False

    def _balanced(self, pair: str) -> str:
        start, depth = self._at, 0
        for at in range(start + 1, len(self._text)):
            sign = self._text[at]
            depth += (sign == pair[0]) - (sign == pair[1])
            if depth == 0:
                self._at = at + 1
                return self._text[start : self._at]
        raise ValueError(f"line {self._line()}: {self._text[start : start + 2]} isn't closed")

    def _variable(self, name: str) -> list[Word]:
        """Return the value of a variable, of an array its first element."""
        self._script.used.add(name)
        if name in self._script.variables:
            return self._script.variables[name][:1] or [Word()]
        if name in _OF_THE_USER:
            return [Word(f"${{oc.env:{name}}}")]
        return [Word(f"${name}", (f"${name}, which the script doesn't set",))]

    def _braces(self, inside: str) -> tuple[list[Word], bool]:
        """Return what `${...}` stands for."""
        match = re.fullmatch(r"([A-Za-z_]\w*|\d+|[@*])(?:\[([@*]|\d+)\])?(?:(:?[-=+?])(.*))?", inside, re.DOTALL)
        if match is None or (match[1] in "@*" and match[3] is None):
            return _stopped(f"${{{inside}}}"), False
        name, element, sign, word = match.groups()
        values = self._script.variables.get(name, [])
        self._script.used.add(name)
        if sign is None:
            if element is None:
                return (self._variable(name) if NAME.match(name) else _stopped(f"${{{inside}}}")), False
            if element in "@*":
                known = name in self._script.variables
                return (list(values), True) if known else (_stopped(f"${{{inside}}}"), False)
            return (values[int(element) :][:1] or [Word()]) if len(element) < 10 else [Word()], False
        filled = bool(values) and (values[0].text != "" or len(values) > 1)
        if sign[-1] == "+":
            if not filled:
                return [Word()], False
            array = re.fullmatch(r'"?\$\{(\w+)\[[@*]\]\}"?', word)  # "${A[@]+"${A[@]}"}"
            return self._braces(f"{array[1]}[@]") if array else ([self._expanded(word)], False)
        if filled:
            return (list(values), True) if element and element in "@*" else (self._variable(name), False)
        if sign[-1] == "?":
            return [Word(f"${name}", (f"${name}, which the script doesn't set",))], False
        value = self._expanded(word)
        if sign[-1] == "=":
            self._script.variables[name] = [value]
        return [value], False

    def _number(self, expression: str) -> int | None:
        """Return the value of `$((expression))`, with the script's variables; None where it isn't of integers."""
        filled = self._expanded(expression)
        if filled.unexpanded:
            return None
        return whole_number(NAME.sub(lambda name: self._variable(name.group())[0].text, filled.text))


def _stopped(raw: str) -> list[Word]:
    return [Word(raw, (raw,))]


_SIGNS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),  # towards 0, as shells divide
    ast.Mod: lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
    ast.Pow: lambda a, b: a**b if 0 <= b < 64 else 2**63,
}


def whole_number(text: str) -> int | None:
    """Return the value of an expression of whole numbers; None where it is something else, or too large."""
    try:
        return _value(ast.parse(text.strip(), mode="eval").body) if len(text) <= 200 else None
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        result = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        result = _value(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    elif isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        result = _SIGNS[type(node.op)](_value(node.left), _value(node.right))
    else:
        raise ValueError("no whole number")
    if abs(result) >= 2**63:
        raise ValueError("too large")
    return result
