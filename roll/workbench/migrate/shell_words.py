"""Shell scripts as commands and words, with the script's own variables filled in. Nothing is run; of arithmetic, whole
numbers are worked out."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]\n]*\])?(\+?=)")
_OF_THE_USER = ("HOME", "USER", "PWD")
"""Variables of the environment that a path may begin with: ours reads them when the run starts."""
_LONGEST = 2**20
"""Characters of a word, with everything filled in: a script that doubles a text forty times ends here."""
_MAX_CHARACTERS = 64 * 2**20
"""Characters that all expansions of a script together may give, `_PER_WORD` more for each word."""
_PER_WORD = 256
_PER_CALL = 2**16
"""What a call of a function counts as."""
_DEEPEST = 40
_PLAIN = re.compile(r"[^\s;&|()<>'\"\\$`]+")
_PLAIN_IN_QUOTES = re.compile(r"[^\"\\$`]+")
_PLAIN_IN_A_DOCUMENT = re.compile(r"[^\\$`]+")
_FUNCTION = re.compile(r"(?:^|(?<=\n))(?:function[ \t]+([\w-]+)[ \t]*(?:\(\))?|([A-Za-z_][\w-]*)[ \t]*\(\))\s*\{(?=\s)")
_ARGUMENTS = ("@", *"123456789")
_DOCUMENT = re.compile(r"<<-?[ \t]*(['\"]?)([A-Za-z_]\w*)\1")
_ESCAPED = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}
"""What stands behind a backslash in $'...'."""
_OPTIONS = 32
"""Words such as `declare -a` that may stand before an assignment."""
_BREAKS = "\n;&|()"
_KEYWORDS = ("if", "then", "else", "elif", "while", "until", "do", "!", "{", "time", "exec", "nohup", "eval")
"""Words that a command may follow on."""
_BRANCHES = {"if": 1, "case": 1, "fi": -1, "esac": -1}


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
    room: int = _MAX_CHARACTERS

    def spend(self, characters: int) -> None:
        """Count what an expansion gives; raise `TooMuch` where a script's become too many."""
        self.room -= characters
        if self.room < 0:
            raise TooMuch(f"its variables grow beyond {_MAX_CHARACTERS:,} characters once they are filled in")


class TooMuch(ValueError):
    """A script whose words grow without end."""


def read_script(text: str, script: Script | None = None) -> Script:
    """Return the commands of a script, from its first line to its last, whichever would be run.

    `script`: what was read before it, whose variables it has. Raises `ValueError` for a quote or bracket that isn't
    closed, for texts beyond a megabyte, or all together beyond `_MAX_CHARACTERS`, and for nested expansions that
    are too deep.
    """
    script = _Reader(text.replace("\r\n", "\n"), script or Script(), 0).script()
    for name in [name for name in script.functions if name not in script.called]:
        body, line = script.functions.pop(name)
        _Reader(body, script, 1, line).script()
    return script


class _Reader:
    def __init__(self, text: str, script: Script, depth: int, line: int = 1) -> None:
        if depth > _DEEPEST:
            raise TooMuch(f"its expansions stand in each other more than {_DEEPEST} levels deep")
        self._text, self._at, self._script, self._depth = text, 0, script, depth
        self._counted, self._lines = 0, line
        self._ends: list[tuple[str, str]] = []
        """Ends of here-documents that begin on the next line, with the quotes around them."""
        self._target = ""
        """File that the command's output goes to."""
        self._branches = 0
        self._if = False
        """Whether `&&` or `||` stands in front."""

    def script(self) -> Script:
        words: list[Word] = []
        while self._at < len(self._text):
            sign = self._text[self._at]
            if sign == "#" and (self._at == 0 or self._text[self._at - 1] in f" \t{_BREAKS}"):
                self._skip_to("\n")
            elif sign in " \t":
                self._at += 1
            elif self._continued():
                self._at += 2
            elif sign in _BREAKS:
                self._command(words)
                words = []
                self._if = self._text[self._at : self._at + 2] in ("&&", "||") or (self._if and sign in "&|()")
                self._at += 2 if self._if and sign in "&|" else 1
                if sign == "\n":
                    self._documents()
            elif sign in "<>":
                self._redirect()
            elif not words and (match := _FUNCTION.match(self._text, self._at)) and self._function(match):
                continue
            else:
                match = _ASSIGNMENT.match(self._text, self._at)
                starts = len(words) < _OPTIONS and all(
                    word.text in ("export", "local", "readonly", "declare", "set") or word.text.startswith("-")
                    for word in words
                )
                if match and starts:
                    self._assign(match)
                else:
                    words += self._word()
                    self._branches += _BRANCHES.get(words[0].text, 0) if len(words) == 1 else 0
                    words = [] if len(words) == 1 and words[0].text in _KEYWORDS else words
        self._command(words)
        return self._script

    def _function(self, head: re.Match[str]) -> bool:
        """Keep the body of a function for its calls, which ends on its line or with a } at the start of another."""
        line_end = (self._text.find("\n", head.end()) + 1 or len(self._text) + 1) - 1
        body = self._text[head.end() : line_end].rstrip()
        end = line_end if body.endswith("}") else self._text.find("\n}", head.end(), head.end() + _LONGEST) + 2
        if end < 2:
            return False
        line = self._line() + head.group().count("\n")
        self._script.functions[head[1] or head[2]] = (self._text[head.end() : end].rstrip().removesuffix("}"), line)
        self._at = end
        return True

    def _command(self, words: list[Word]) -> None:
        """Enter a command: of a function those of its body, with its arguments."""
        name, names = words[0].text if words else "", [word.text for word in words[1:] if _NAME.fullmatch(word.text)]
        variables = self._script.variables
        if name in self._script.functions:
            body, line = self._script.functions.pop(name)  # one that calls itself has no end here
            self._script.called.add(name)
            self._script.spend(_PER_CALL)
            before = {key: variables.pop(key) for key in list(variables) if key in _ARGUMENTS}
            self._arguments(words[1:])
            _Reader(body, self._script, self._depth + 1, line).script()
            self._arguments([])
            variables.update(before)
            self._script.functions.setdefault(name, (body, line))
        elif name == "shift" and "@" in variables:
            by = int(words[1].text) if len(words) > 1 and words[1].text.isdecimal() and len(words[1].text) < 4 else 1
            self._arguments(variables["@"][by:])
        elif words:
            self._script.commands.append(words)
        if name in ("source", ".") and len(words) > 1:
            self._script.notes.append(f"line {words[0].line}: {words[1].text[:60]} isn't read: variables that it sets "
                                      "have other values there than here")  # fmt: skip
        names = names[:1] if name in ("for", "select") else names if name in ("read", "mapfile", "unset") else []
        for unknown in names:
            why = "unsets" if name == "unset" else "sets while it runs"
            variables[unknown] = [Word(f"${unknown}", (f"${unknown}, which the script {why}",))]

    def _arguments(self, words: list[Word]) -> None:
        """Set $1, $2, ... and $@ of a function."""
        variables = self._script.variables
        for key in _ARGUMENTS:
            variables.pop(key, None)
        if words or self._depth:
            variables |= {str(i): [word] for i, word in enumerate(words[:9], 1)} | {"@": words}

    def _continued(self) -> bool:
        return self._text.startswith("\\\n", self._at)

    def _line(self) -> int:
        self._lines += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        return self._lines

    def _skip_to(self, sign: str) -> None:
        end = self._text.find(sign, self._at)
        self._at = len(self._text) if end < 0 else end

    def _redirect(self) -> None:
        if match := _DOCUMENT.match(self._text, self._at):
            self._ends.append((match.group(2), match.group(1)))
            self._at = match.end()
            return
        match = re.compile(r"[<>]+&?[ \t]*").match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        target = self._word(split=False)
        self._target = target[0].text if target and ">" in match.group() else self._target

    def _documents(self) -> None:
        for end, quote in self._ends:
            start = self._at
            match = re.compile(rf"^[ \t]*{re.escape(end)}[ \t]*$", re.MULTILINE).search(self._text, start)
            self._at = match.end() if match else len(self._text)
            body = self._text[start : match.start() if match else self._at]
            filled = Word(body) if quote else _Reader(body, self._script, self._depth + 1)._document()
            self._script.documents.append((self._target, body, filled))
            for command in self._script.commands[-2:]:
                if command[0].text == "read":  # into a variable
                    self._script.variables[command[-1].text] = [Word(body) if quote else self._whole(body)]
        self._ends, self._target = [], ""

    def _assign(self, match: re.Match[str]) -> None:
        name, subscript, sign = match.groups()
        line, self._at = self._line(), match.end()
        before = self._script.variables.get(name, [])
        added = before if sign == "+=" else []
        self._script.spend(len(added) + (len(added[0].text) if added else 0))
        if self._text[self._at : self._at + 1] == "(":
            self._at += 1
            values = [*added, *self._array()]
        else:
            value = (self._word(split=False) or [Word()])[0]
            if added:
                value = Word(added[0].text + value.text, (*added[0].unexpanded, *value.unexpanded), value.line)
            values = [value]
        if subscript:
            raw = f"{name}{subscript}"
            values = [Word(f"${name}", (f"${name}, of which the script sets {raw} by itself",))]
        if (self._branches > 0 or self._if) and [word.text for word in before] != [word.text for word in values]:
            shown = " ".join(word.text for word in values) or "an empty text"
            self._script.conditions[name] = (
                f"line {line}: {name} depends on a condition; the last in the script was taken, "
                f"{shown if len(shown) < 60 else shown[:60] + '...'}"
            )
        self._script.variables[name] = values

    def _array(self) -> Iterator[Word]:
        while self._at < len(self._text):
            sign = self._text[self._at]
            if sign == ")":
                self._at += 1
                return
            if sign.isspace():
                self._at += 1
            elif self._continued():
                self._at += 2
            elif sign == "#":
                self._skip_to("\n")
            elif sign in _BREAKS or sign in "<>":
                self._at += 1
            else:
                yield from self._word()
        raise ValueError("an array ( isn't closed")

    def _word(self, *, split: bool = True, one_word: bool = False) -> list[Word]:
        """Return one word, or those that a variable without quotes around it holds; `one_word`: all the text is one."""
        line = self._line()
        words, quoted, inside = [Word(line=line)], False, False
        while self._at < len(self._text):
            sign, after = self._text[self._at], self._text[self._at + 1 : self._at + 2]
            if self._continued():
                self._at += 2
            elif sign == '"':
                inside, quoted = not inside, True
                self._at += 1
            elif not inside and (sign == "'" or (sign == "$" and after == "'")):
                self._single(words[-1])
                quoted = True
            elif sign in "$`":
                self._join(words, *self._expansion(), split=split and not inside)
            elif sign == "\\":
                self._add(words[-1], after if not inside or (after and after in '"\\$`') else sign + after)
                self._at += 2
            elif inside:
                self._run(words[-1], _PLAIN_IN_QUOTES)
            elif one_word or not (sign.isspace() or sign in _BREAKS or sign in "<>"):
                self._run(words[-1], _PLAIN)
            elif sign in "<>" and "=" in words[-1].text and split:
                self._run(words[-1], _PLAIN)  # of a placeholder such as key=<path>
            else:
                break
        if inside:
            raise ValueError(f"line {line}: a quote \" isn't closed")
        if self._text[self._at : self._at + 1] in ("<", ">") and words[0].text.isdecimal() and not quoted:
            return []  # the 2 of 2>&1
        return [word for word in words if word.text or word.unexpanded or quoted]

    def _document(self) -> Word:
        """Return a here-document, in which quotes mean nothing."""
        words = [Word()]
        while self._at < len(self._text):
            if self._text[self._at] in "$`":
                self._join(words, *self._expansion(), split=False)
            elif self._text[self._at] == "\\" and self._text[self._at + 1 : self._at + 2] in ("\\", "$", "`", "\n"):
                self._add(words[-1], self._text[self._at + 1].strip("\n"))
                self._at += 2
            else:
                self._run(words[-1], _PLAIN_IN_A_DOCUMENT)
        return Word(" ".join(word.text for word in words), tuple(part for word in words for part in word.unexpanded))

    def _single(self, word: Word) -> None:
        """Read text in '...', or in $'...' with its escapes."""
        if match := _ESCAPED.match(self._text, self._at):
            self._add(word, re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[0]), match[1]))
            self._at = match.end()
        else:
            self._at += self._text[self._at] == "$"
            self._add(word, self._until("'"))

    def _until(self, sign: str) -> str:
        end = self._text.find(sign, self._at + 1)
        if end < 0:
            raise ValueError(f"line {self._line()}: a quote {sign} isn't closed")
        text = self._text[self._at + 1 : end]
        self._at = end + 1
        return text

    def _join(self, words: list[Word], values: list[Word], is_array: bool, *, split: bool) -> None:
        """Add what an expansion gives to the last word; elements of an array, and with `split` blanks, begin others."""
        for i, value in enumerate(values):
            parts = value.text.split() if split and not is_array and not value.unexpanded else [value.text]
            for j, part in enumerate(parts):
                if i or j:
                    words.append(Word(line=words[-1].line))
                self._script.spend(len(part) + _PER_WORD)
                self._add(words[-1], part)
            words[-1].unexpanded += value.unexpanded

    def _run(self, word: Word, plain: re.Pattern[str]) -> None:
        """Add the characters from here on that stand for themselves: one at least."""
        match = plain.match(self._text, self._at)
        end = match.end() if match else self._at + 1
        self._add(word, self._text[self._at : end])
        self._at = end

    @staticmethod
    def _add(word: Word, text: str) -> None:
        word.text += text
        if len(word.text) > _LONGEST:
            raise TooMuch(f"line {word.line}: a word grows beyond {_LONGEST:,} characters")

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
        if match := _NAME.match(text, start + 1):
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
                return (self._variable(name) if _NAME.match(name) else _stopped(f"${{{inside}}}")), False
            if element in "@*":
                known = name in self._script.variables
                return (list(values), True) if known else (_stopped(f"${{{inside}}}"), False)
            return (values[int(element) :][:1] or [Word()]) if len(element) < 10 else [Word()], False
        filled = bool(values) and (values[0].text != "" or len(values) > 1)
        if sign[-1] == "+":
            if not filled:
                return [Word()], False
            array = re.fullmatch(r'"?\$\{(\w+)\[[@*]\]\}"?', word)  # "${A[@]+"${A[@]}"}"
            return self._braces(f"{array[1]}[@]") if array else ([self._whole(word)], False)
        if filled:
            return (list(values), True) if element and element in "@*" else (self._variable(name), False)
        if sign[-1] == "?":
            return [Word(f"${name}", (f"${name}, which the script doesn't set",))], False
        value = self._whole(word)
        if sign[-1] == "=":
            self._script.variables[name] = [value]
        return [value], False

    def _whole(self, text: str) -> Word:
        """Return a text with its own variables and quotes expanded."""
        return (_Reader(text, self._script, self._depth + 1)._word(split=False, one_word=True) or [Word()])[0]

    def _number(self, expression: str) -> int | None:
        """Return the value of `$((expression))`, with the script's variables; None where it isn't of integers."""
        filled = self._whole(expression)
        if filled.unexpanded:
            return None
        return whole_number(_NAME.sub(lambda name: self._variable(name.group())[0].text, filled.text))


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
