"""Shell scripts as commands and words, with the script's own variables filled in. Nothing is run; of arithmetic, whole
numbers are worked out."""

from __future__ import annotations

import re
from collections.abc import Iterator

from roll.workbench.migrate.shell_expansions import NAME, Expansions, Script, TooMuch, Word

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]\n]*\])?(\+?=)")
_LONGEST = 2**20
"""Characters of a word, with everything filled in: a script that doubles a text forty times ends here."""
_PER_WORD = 256
"""Characters that a word counts as, besides its own."""
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


def read_script(text: str, script: Script | None = None) -> Script:
    """Return the commands of a script, from its first line to its last, whichever would be run.

    `script`: what was read before it, whose variables it has. Raises `ValueError` for a quote or bracket that isn't
    closed, for texts beyond a megabyte, or all together beyond `MAX_CHARACTERS`, and for nested expansions that
    are too deep.
    """
    script = _Reader(text.replace("\r\n", "\n"), script or Script(), 0).script()
    for name in [name for name in script.functions if name not in script.called]:
        body, line = script.functions.pop(name)
        _Reader(body, script, 1, line).script()
    return script


class _Reader(Expansions):
    def __init__(self, text: str, script: Script, depth: int, line: int = 1) -> None:
        if depth > _DEEPEST:
            raise TooMuch(f"its expansions stand in each other more than {_DEEPEST} levels deep")
        super().__init__(text, script, line)
        self._depth = depth
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
        name, names = words[0].text if words else "", [word.text for word in words[1:] if NAME.fullmatch(word.text)]
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
                    self._script.variables[command[-1].text] = [Word(body) if quote else self._expanded(body)]
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
            self._add(word, re.sub(r"\\(.)", lambda escape: _ESCAPES.get(escape[1], escape[0]), match[1]))
            self._at = match.end()
        else:
            self._at += self._text[self._at] == "$"
            self._add(word, self._until("'"))

    def _expanded(self, text: str) -> Word:
        return (_Reader(text, self._script, self._depth + 1)._word(split=False, one_word=True) or [Word()])[0]

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
