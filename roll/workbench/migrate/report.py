"""What became of every key of a file, as text and as JSON; and the new file, written whole or not at all."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from roll.configs.parsing.loader import PIPELINES
from roll.utils.secrets import is_secret_key, without_passwords
from roll.utils.terminal import printable
from roll.utils.umask import apply_umask

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
class KeyUse:
    """A key that the file uses."""

    key: str
    """Theirs, dotted."""
    value: Any
    fate: Fate
    ours: tuple[str, ...] = ()
    """Where it went."""
    note: str = ""
    parts: list[KeyUse] = field(default_factory=list)
    """Of a reference to a whole section: what became of the keys in it."""

    def line(self) -> str:
        """Return what became of it, in a line."""
        value = f" = {shown(masked(self.key, self.value))}"
        arrow = f" -> {', '.join(self.ours)}" if self.ours else ""
        return f"{self.key}{value}{arrow}{f': {self.note}' if self.note else ''}"


@dataclass(kw_only=True)
class MigrationReport:
    """What became of a file."""

    source: str
    system: str
    """Whose file it is, as its project writes it."""
    pipeline: str = ""
    uses: list[KeyUse] = field(default_factory=list)
    """A key of the file each."""
    filled: list[KeyUse] = field(default_factory=list)
    """Keys that the file leaves out, and whose default there is another than here: it is written out."""
    decisions: list[str] = field(default_factory=list)
    """Choices that no single key of the file stands for."""
    missing: list[str] = field(default_factory=list)
    """What the file still lacks before it passes `roll check`."""
    elsewhere: list[str] = field(default_factory=list)
    """What it refers to and isn't on this machine: models, data, packages, devices."""
    command: str = ""
    """For a job that is a command here, that command."""

    def fold(self) -> None:
        """Say once what several steps said about one key, and nothing that a terminal would obey."""
        for use in self.uses:
            for part in use.parts:
                use.ours += part.ours
                if part.fate not in ("translated", "dead"):
                    use.fate = part.fate if part.fate in ("absent", "unexpanded") else "decided"
                    use.note += f"{'; ' if use.note else ''}{part.key.removeprefix(use.key).lstrip('.')}: {part.note}"
            if use.parts and not use.ours and use.fate == "translated":
                use.fate, use.note = "dead", use.parts[0].note
            use.ours = tuple(dict.fromkeys(use.ours))
            if use.fate == "translated" and not use.ours and not use.note:
                use.note = "the default here too"
        self.missing = [printable(_on_a_line(line)) for line in dict.fromkeys(self.missing)]
        self.decisions = list(dict.fromkeys(self.decisions))

    def of(self, fate: str) -> list[KeyUse]:
        """Return keys with one fate."""
        return [use for use in self.uses if use.fate == fate]

    def counts(self) -> dict[str, int]:
        """Return how many keys have each fate."""
        return {fate: len(self.of(fate)) for fate in TITLES}

    def summary(self) -> str:
        """Return all of it in a line."""
        counts = self.counts()
        words = {"translated": "translated", "decided": "decided", "absent": "asked for", "unexpanded": "not expanded",
                 "quiet": "without a counterpart", "dead": "not needed"}  # fmt: skip
        listed = ", ".join(f"{count} {words[fate]}" for fate, count in counts.items() if count)
        keys = f"{len(self.uses)} key{'s' * (len(self.uses) != 1)}"
        return f"{self.system}{f', pipeline {self.pipeline}' if self.pipeline else ''}: {keys}: {listed or 'none'}"

    def text(self) -> str:
        """Return every list."""
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
        """Return the same for programs."""
        lists = {fate: [_plain(use) for use in self.of(fate)] for fate in TITLES}
        return {
            "source": self.source, "system": self.system, "pipeline": self.pipeline, **lists,
            "filled": [_plain(use) for use in self.filled], "decisions": self.decisions, "missing": self.missing,
            "elsewhere": self.elsewhere, "command": self.command,
        }  # fmt: skip

    def json(self) -> str:
        """Return the same as text."""
        return json.dumps(self.plain(), indent=2, default=str) + "\n"


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


def _plain(use: KeyUse) -> Mapping[str, Any]:
    return {"key": use.key, "value": masked(use.key, use.value), "ours": list(use.ours), "note": use.note}


def _listed(title: str, lines: Sequence[str]) -> list[str]:
    return ["", f"{title} ({len(lines)}):", *(f"  {_on_a_line(line)}" for line in lines)] if lines else []


def _on_a_line(text: str) -> str:
    return " ".join(text.split())


def shown(value: Any) -> str:
    """Return a value as YAML writes it, on one line and not longer than one."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:77]}..."


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - every value is written out
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Represent several lines as a block."""
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _Dumper.represent_text)


def as_yaml(report: MigrationReport, tree: Mapping[str, Any]) -> str:
    """Return the file's text, with what is still to do in its head."""
    head = [f"# {Path(report.source).name} of {report.system}, translated by roll migrate."]
    head += [f"# missing: {line}" for line in report.missing]
    head = [printable(" ".join(line.split())) for line in head]
    body = yaml.dump(
        ordered(PIPELINES[report.pipeline], tree), Dumper=_Dumper, sort_keys=False, width=116, allow_unicode=True,
        default_flow_style=None,
    )  # fmt: skip
    return "\n".join(head) + "\n" + body


def ordered(hint: Any, tree: Any) -> Any:
    """Return the tree with keys in the order of the fields: first those with a value, then sections."""
    if not isinstance(tree, Mapping):
        return tree
    members = get_args(hint) if get_origin(hint) in (Union, type(int | str)) else (hint,)
    section = next((member for member in members if is_dataclass(member) and isinstance(member, type)), None)
    if section is None:
        inner = next((get_args(member)[1] for member in members if get_origin(member) is dict), None)
        return {key: ordered(inner, value) for key, value in tree.items()}
    hints = get_type_hints(section)
    position = {spec.name: i for i, spec in enumerate(fields(section))}
    keys = sorted(
        tree, key=lambda key: (key != "pipeline", isinstance(tree[key], Mapping), position.get(key, len(position)))
    )
    return {key: ordered(hints.get(key), tree[key]) for key in keys}


def write_file(file: Path, text: str, *, force: bool) -> None:
    """Write a file whole or not at all; raise `ValueError` if it is there and not `force`, or can't be written."""
    if file.exists() and not force:
        raise ValueError(f"{file} is there already: choose another name, or --force to replace it")
    try:
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
            apply_umask(Path(name))
            Path(name).replace(file)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ValueError(f"{file} can't be written: {error.strerror}") from None
