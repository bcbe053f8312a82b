"""What became of every key of a file: the lists of a migration, as text and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from roll.utils.secrets import is_secret_key, without_passwords
from roll.utils.terminal import printable

Fate = Literal["translated", "decided", "absent", "unexpanded", "quiet", "dead"]

TITLES: dict[str, str] = {
    "translated": "translated",
    "decided": "decided, so look at it",
    "absent": "no counterpart, and it changes what is trained: the new file asks with ???",
    "unexpanded": "not expanded: nothing is run or worked out, so write it yourself",
    "quiet": "no counterpart, and what is trained stays the same",
    "dead": "needed by nothing here, and what is trained stays the same",
}
"""Headings, in their order."""


_SECRET = re.compile(r"(api_?key|password|secret|(^|(?<!^eos)(?<!^pad)(?<!^bos)_)token)$")
"""Of names in small letters, besides those of `is_secret_key`: other systems have more. Tokens of texts are none."""
HIDDEN = "(not shown)"
"""In place of a key or password."""


@dataclass(kw_only=True)
class Use:
    """A key that the file uses."""

    key: str
    """Theirs, dotted."""
    value: Any
    fate: Fate
    ours: tuple[str, ...] = ()
    """Where it went."""
    note: str = ""
    parts: list[Use] = field(default_factory=list)
    """Of a reference to a whole section: what became of the keys in it."""

    def line(self) -> str:
        """What became of it, in a line."""
        value = f" = {shown(masked(self.key, self.value))}"
        arrow = f" -> {', '.join(self.ours)}" if self.ours else ""
        return f"{self.key}{value}{arrow}{f': {self.note}' if self.note else ''}"


@dataclass(kw_only=True)
class Report:
    """What became of a file."""

    source: str
    system: str
    """Whose file it is, as its project writes it."""
    pipeline: str = ""
    uses: list[Use] = field(default_factory=list)
    """A key of the file each."""
    filled: list[Use] = field(default_factory=list)
    """Keys that the file leaves out, and whose default there is another than here: it is written out."""
    decisions: list[str] = field(default_factory=list)
    """Choices that no single key of the file stands for."""
    missing: list[str] = field(default_factory=list)
    """What the file still lacks before it passes `roll check`."""
    elsewhere: list[str] = field(default_factory=list)
    """What it refers to and isn't on this machine: models, data, packages, devices."""
    command: str = ""
    """For a job that is a command here, that command."""

    def of(self, fate: str) -> list[Use]:
        """Keys with one fate."""
        return [use for use in self.uses if use.fate == fate]

    def counts(self) -> dict[str, int]:
        """How many keys have each fate."""
        return {fate: len(self.of(fate)) for fate in TITLES}

    def summary(self) -> str:
        """All of it in a line."""
        counts = self.counts()
        words = {"translated": "translated", "decided": "decided", "absent": "asked for", "unexpanded": "not expanded",
                 "quiet": "without a counterpart", "dead": "not needed"}  # fmt: skip
        listed = ", ".join(f"{count} {words[fate]}" for fate, count in counts.items() if count)
        keys = f"{len(self.uses)} key{'s' * (len(self.uses) != 1)}"
        return f"{self.system}{f', pipeline {self.pipeline}' if self.pipeline else ''}: {keys}: {listed or 'none'}"

    def text(self) -> str:
        """Every list."""
        parts = [_on_a_line(f"{self.source}: {self.summary()}")]
        for fate, title in TITLES.items():
            parts += _listed(title, [use.line() for use in self.of(fate)])
        parts += _listed(
            "left out in the file, with another default here: written out", [use.line() for use in self.filled]
        )
        parts += _listed("decided for the file as a whole", self.decisions)
        parts += _listed("missing before it passes roll check", self.missing)
        parts += _listed("not on this machine", self.elsewhere)
        if self.command:
            parts += ["", "this job is a command here:", f"  {self.command}"]
        return printable("\n".join(parts) + "\n")

    def plain(self) -> dict[str, Any]:
        """The same for programs."""
        lists = {fate: [_plain(use) for use in self.of(fate)] for fate in TITLES}
        return {
            "source": self.source,
            "system": self.system,
            "pipeline": self.pipeline,
            **lists,
            "filled": [_plain(use) for use in self.filled],
            "decisions": self.decisions,
            "missing": self.missing,
            "elsewhere": self.elsewhere,
            "command": self.command,
        }

    def json(self) -> str:
        """The same as text."""
        return json.dumps(self.plain(), indent=2, ensure_ascii=False, default=str) + "\n"


def masked(key: str, value: Any) -> Any:
    """Return the value without what no report may show: API keys, tokens, passwords."""
    if isinstance(value, Mapping):
        return {str(below): masked(str(below), entry) for below, entry in value.items()}
    if isinstance(value, list):
        return [masked(key, entry) for entry in value]
    last = key.rpartition(".")[2]
    if value is not None and (_SECRET.search(last.lower()) or is_secret_key(last)):
        return HIDDEN
    return without_passwords(value, HIDDEN) if isinstance(value, str) else value


def _plain(use: Use) -> Mapping[str, Any]:
    return {"key": use.key, "value": masked(use.key, use.value), "ours": list(use.ours), "note": use.note}


def _listed(title: str, lines: Sequence[str]) -> list[str]:
    return ["", f"{title} ({len(lines)}):", *(f"  {_on_a_line(line)}" for line in lines)] if lines else []


def _on_a_line(text: str) -> str:
    return " ".join(text.split())


def shown(value: Any) -> str:
    """A value as YAML writes it, on one line and not longer than one."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:77]}..."
