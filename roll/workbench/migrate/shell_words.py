"""Shell scripts as commands and words, with the script's own variables filled in. Nothing is run; of arithmetic, whole
numbers are worked out."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from roll.workbench.migrate.shell_numbers import whole_number

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?=)")
_OF_THE_USER = ("HOME", "USER", "PWD")
"""Variables of the environment that a path may begin with: ours reads them when the run starts."""
_LONGEST = 2**20
"""Characters of a word, with everything filled in: a script that doubles a text forty times ends here."""
_MOST = 64 * 2**20
"""Characters that all expansions of a script together may give, `_PER_WORD` more for each word."""
_PER_WORD = 256
_DEEPEST = 40
_PLAIN = re.compile(r"[^\s;&|()<>'\"\\$`]+")
_PLAIN_IN_QUOTES = re.compile(r"[^\"\\$`]+")
_OPTIONS = 32
"""Words such as `declare -a` that may stand before an assignment."""
_BREAKS = "\n;&|()"
_READ = re.compile(
    r"^[ \t]*read\b[^\n<]*?(?P<name>[A-Za-z_]\w*)[ \t]*<<-?[ \t]*(?P<quote>['\"]?)(?P<end>\w+)(?P=quote)[^\n]*\n"
    r"(?P<body>.*?)^[ \t]*(?P=end)[ \t]*$", re.MULTILINE | re.DOTALL,
)  # fmt: skip
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}
"""What stands behind a backslash in $'...'."""
_KEYWORDS = ("if", "then", "else", "elif", "while", "until", "do", "!", "{", "time", "exec", "nohup")
"""Words that a command may follow on."""


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
    room: int = _MOST

    def spend(self, characters: int) -> None:
        """Count what an expansion gives; raise `TooMuch` where a script's become too many."""
        self.room -= characters
        if self.room < 0:
            raise TooMuch(f"its variables grow beyond {_MOST:,} characters once they are filled in")


class TooMuch(ValueError):
    """A script whose words grow without end."""


def read_script(text: str) -> Script:
    """Return the commands of a script, from its first line to its last, whichever would be run.

    Raises `ValueError` for a quote or bracket that isn't closed, for texts that grow beyond a megabyte, or all together
    beyond `_MOST`, and for expansions in each other that are too deep.
    """
    return _Reader(_READ.sub(_assigned, text.replace("\r\n", "\n"))).script()


def _assigned(match: re.Match[str]) -> str:
    """A here-document that `read` puts into a variable, as an assignment over as many lines."""
    name, quote, body = match["name"], match["quote"], match["body"]
    inside = (
        f"'{body.replace(chr(39), chr(39) + chr(92) + chr(39) + chr(39))}'"
        if quote
        else f'"{body.replace(chr(34), chr(92) + chr(34))}"'
    )
    return f"{name}={inside}\n"


class _Reader:
    def __init__(self, text: str, script: Script | None = None, depth: int = 0) -> None:
        self._text, self._at = text, 0
        self._breaks = [match.start() for match in re.finditer("\n", text)]
        self._script, self._depth = Script() if script is None else script, depth
        self._here: list[str] = []
        """Ends of here-documents that begin on the next line."""

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
                self._at += 1
                self._end(words)
                words = []
                if sign == "\n":
                    self._skip_documents()
            elif sign in "<>" or re.compile(r"\d+[<>]").match(self._text, self._at):
                self._redirect()
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
                    words = [] if len(words) == 1 and words[0].text in _KEYWORDS else words
        self._end(words)
        return self._script

    def _continued(self) -> bool:
        return self._text.startswith("\\\n", self._at)

    def _line(self, at: int) -> int:
        return bisect.bisect_left(self._breaks, at) + 1

    def _end(self, words: list[Word]) -> None:
        if words:
            self._script.commands.append(words)

    def _skip_to(self, sign: str) -> None:
        found = self._text.find(sign, self._at)
        self._at = len(self._text) if found < 0 else found

    def _redirect(self) -> None:
        match = re.compile(r"\d*<<-?\s*(['\"]?)([A-Za-z_]\w*)\1").match(self._text, self._at)
        if match:
            self._here.append(match.group(2))
            self._at = match.end()
            return
        match = re.compile(r"\d*[<>]+&?[ \t]*(&?\d+|[^\s;&|]*)").match(self._text, self._at)
        self._at = match.end() if match else self._at + 1

    def _skip_documents(self) -> None:
        for end in self._here:
            match = re.compile(rf"^[ \t]*{re.escape(end)}[ \t]*$", re.MULTILINE).search(self._text, self._at)
            self._at = match.end() if match else len(self._text)
        self._here = []

    def _assign(self, match: re.Match[str]) -> None:
        name, self._at = match.group(1), match.end()
        before = self._script.variables.get(name, []) if match.group(2) == "+=" else []
        self._script.spend(len(before) + (len(before[0].text) if before else 0))
        if self._text[self._at : self._at + 1] == "(":
            self._at += 1
            values = list(self._array())
            self._script.variables[name] = [*before, *values]
            return
        values = self._word(split=False)
        value = values[0] if values else Word()
        if before:
            value = Word(before[0].text + value.text, (*before[0].unexpanded, *value.unexpanded), value.line)
        self._script.variables[name] = [value]

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
            else:
                yield from self._word()
        raise ValueError("an array ( isn't closed")

    def _word(self, *, split: bool = True) -> list[Word]:
        """One word, or those that a variable without quotes around it holds."""
        line = self._line(self._at)
        words, quoted = [Word(line=line)], False
        while self._at < len(self._text):
            sign = self._text[self._at]
            if self._continued():
                break
            if sign.isspace() or sign in _BREAKS or sign in "<>":
                if sign in "<>" and words[-1].text.count("=") and split:
                    self._add(words[-1], sign)  # of a placeholder such as key=<path>
                    self._at += 1
                    continue
                break
            if sign == "'":
                self._add(words[-1], self._until("'"))
                quoted = True
            elif sign == '"':
                self._at += 1
                self._double(words)
                quoted = True
            elif sign == "\\":
                self._add(words[-1], self._text[self._at + 1 : self._at + 2])
                self._at += 2
            elif self._text.startswith("$'", self._at):
                self._escaped(words[-1])
                quoted = True
            elif sign in "$`":
                self._join(words, self._expansion(), split=split)
            else:
                self._run(words[-1], _PLAIN)
        return [word for word in words if word.text or word.unexpanded or quoted]

    def _until(self, sign: str) -> str:
        end = self._text.find(sign, self._at + 1)
        if end < 0:
            line = self._line(self._at)
            raise ValueError(f"line {line}: a quote {sign} isn't closed")
        text = self._text[self._at + 1 : end]
        self._at = end + 1
        return text

    def _escaped(self, word: Word) -> None:
        """Text in $'...', with its escapes."""
        match = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL).match(self._text, self._at)
        if match is None:
            raise ValueError(f"line {self._line(self._at)}: a quote $' isn't closed")
        self._add(word, re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[0]), match[1], flags=re.DOTALL))
        self._at = match.end()

    def _double(self, words: list[Word]) -> None:
        start = self._at
        while self._at < len(self._text):
            sign = self._text[self._at]
            if sign == '"':
                self._at += 1
                return
            if self._continued():
                self._at += 2
            elif sign == "\\" and self._text[self._at + 1 : self._at + 2] in ('"', "\\", "$", "`"):
                self._add(words[-1], self._text[self._at + 1])
                self._at += 2
            elif sign in "$`":
                self._join(words, self._expansion(), split=False)
            elif sign == "\\":
                self._add(words[-1], sign)
                self._at += 1
            else:
                self._run(words[-1], _PLAIN_IN_QUOTES)
        line = self._line(start)
        raise ValueError(f"line {line}: a quote \" isn't closed")

    def _join(self, words: list[Word], found: tuple[list[Word], bool], *, split: bool) -> None:
        """Add what an expansion gives to the last word; elements of an array, and with `split` blanks, begin others."""
        values, is_array = found
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
        """What a `$` or a backquote stands for, and whether that are elements of an array."""
        text, start = self._text, self._at
        if text[start] == "`":
            raw = f"`{self._until('`')}`"
            return [Word(raw, (raw,))], False
        if text.startswith("$(", start):
            raw = self._balanced("(", ")")
            number = (
                _Expander(self._script, self._depth).number(raw[3:-2])
                if raw.startswith("$((") and raw.endswith("))")
                else None
            )
            return [Word(raw, (raw,)) if number is None else Word(str(number))], False
        if text.startswith("${", start):
            raw = self._balanced("{", "}")
            return _Expander(self._script, self._depth).braces(raw[2:-1])
        match = _NAME.match(text, start + 1)
        if match:
            self._at = match.end()
            return _Expander(self._script, self._depth).variable(match.group()), False
        sign = text[start + 1 : start + 2]
        self._at += 2 if sign and sign in "@*#?$!-0123456789" else 1
        raw = text[start : self._at]
        return ([Word()], False) if raw in ("$@", "$*") else ([Word(raw, (raw,) if len(raw) > 1 else ())], False)

    def _balanced(self, opening: str, closing: str) -> str:
        start, depth, at = self._at, 0, self._at + 1
        while at < len(self._text):
            sign = self._text[at]
            depth += (sign == opening) - (sign == closing)
            at += 1
            if depth == 0:
                self._at = at
                return self._text[start:at]
        line = self._line(start)
        raise ValueError(f"line {line}: {self._text[start : start + 2]} isn't closed")


class _Expander:
    def __init__(self, script: Script, depth: int = 0) -> None:
        self._script, self._depth = script, depth
        if depth > _DEEPEST:
            raise TooMuch(f"its expansions stand in each other more than {_DEEPEST} levels deep")

    def variable(self, name: str) -> list[Word]:
        """The value of a variable, of an array its first element."""
        if name in self._script.variables:
            return self._script.variables[name][:1] or [Word()]
        if name in _OF_THE_USER:
            return [Word(f"${{oc.env:{name}}}")]
        return [Word(f"${name}", (f"${name}, which the script doesn't set",))]

    def braces(self, inside: str) -> tuple[list[Word], bool]:
        """What `${...}` stands for."""
        raw = f"${{{inside}}}"
        match = _NAME.match(inside)
        if not match:
            positional = re.fullmatch(r"(\d+|@|\*):?-(.*)", inside, re.DOTALL)
            if positional:
                return [self.text(positional.group(2))], False
            return [Word(raw, (raw,))], False
        name, rest = match.group(), inside[match.end() :]
        there = name in self._script.variables
        if not rest:
            return self.variable(name), False
        if rest in ("[@]", "[*]"):
            return (list(self._script.variables[name]), True) if there else ([Word()], True)
        if element := re.fullmatch(r"\[(\d+)\]", rest):
            values = self._script.variables.get(name, [])
            index = int(element.group(1))
            return ([values[index]] if index < len(values) else [Word()]), False
        operator = re.match(r":?[-=+?]", rest)
        if not operator:
            return [Word(raw, (raw,))], False
        word = rest[operator.end() :]
        filled = there and (self._script.variables[name][:1] or [Word()])[0].text != ""
        if operator.group()[-1] == "+":
            return [self.text(word) if filled else Word()], False
        if filled:
            return self.variable(name), False
        if operator.group()[-1] == "?":
            return [Word(raw, (f"${name}, which the script doesn't set",))], False
        value = self.text(word)
        if operator.group()[-1] == "=":
            self._script.variables[name] = [value]
        return [value], False

    def number(self, expression: str) -> int | None:
        """The value of `$((expression))`, with the script's variables; None where it isn't one of whole numbers."""
        filled = self.text(expression)
        if filled.unexpanded:
            return None
        return whole_number(_NAME.sub(lambda name: self.variable(name.group())[0].text, filled.text))

    def text(self, word: str) -> Word:
        """The text after `:-`, with its own variables and quotes."""
        reader = _Reader(word, self._script, self._depth + 1)
        found = Word()
        while reader._at < len(word):
            for part in reader._word(split=False):
                reader._add(found, part.text)
                found.unexpanded += part.unexpanded
            if reader._at < len(word):
                reader._add(found, word[reader._at])
                reader._at += 1
        return found
