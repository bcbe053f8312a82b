"""Keys of other projects: a row each, from the `.keys` files beside this one, found by path or by last word.

A `.keys` file is read line by line; a line that begins with blanks goes on the one above.

    @system trl TRL                     what follows is of this system, again or anew; its name as its project writes it
    @release 1a2b3c4                    what its rows were read in, where no table of `peers.py` says it
    @earlier a.b *.c                    keys, by pattern, that only versions before the release checked have
    @let t actor_train.training_args    $t stands for it in what follows
    @role student actor_train           <role> in a key is `student`, in ours actor_train
    @each a.b/actor_train c/critic/verl until @end once for each: <at> is a.b, then c, of system verl; <ours> likewise
    @under trainer                      keys that follow stand below `trainer`
    [Sampling]                          heading on docs/coming_from.md
    their.key other -> ours $t.* :how {true: a} = 8 # note
                                        translated; nothing: called the same; *: their last word; `:how` names the
                                        conversion; {}: their values by ours; =: their default, where no table has it
    their.key ?> ours # note            decided: there is a choice, and the note says which way and why
    -- reason (see ours) :: keys        nothing here needs it, and it changes nothing that is trained
    ~~ reason (see ours) :: keys        nothing here does this, and it changes nothing that is trained
    !! reason (see ours) :: keys        nothing here does this, and it changes what is trained: `ours` is asked for,
                                        but for a value of `key=value`, which is their default
    @was old/new section.key            names they had before for rows above; without / the new one's dots were _
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import yaml

Fate = Literal["translated", "decided", "dead", "quiet", "absent"]
NO_DEFAULT: Any = object()
"""In place of a default that no row has."""
ROLE = "<role>"
CONDITIONS = ("if", "else", "also", "given", "trained")
"""Words in {} that are no values of theirs: what they mean says the conversion (`flag_if` of openrlhf.py)."""
_SIGNS: dict[str, Fate] = {"->": "translated", "?>": "decided", "--": "dead", "~~": "quiet", "!!": "absent"}
_ROW = re.compile(
    r"(?P<keys>.+?) (?P<sign>->|\?>)(?P<to>(?: (?![:{=#] ?)\S+)*)(?: :(?P<how>\w+))?(?: (?P<values>\{.*?\}))?"
    r"(?: = (?P<default>.+?))?(?: # (?P<note>.*))?"
)
_REASON = re.compile(r"(?P<sign>--|~~|!!) (?P<note>.*?)(?: \(see (?P<to>[^)]*)\))? :: (?P<keys>.*)")


@dataclass(frozen=True, kw_only=True)
class PeerKey:
    """A key of another system."""

    key: str
    """Theirs, dotted. `<role>` is one of their roles, `<name>` a name of the user's own, `**` everything below."""
    fate: Fate
    to: tuple[str, ...] = ()
    """Ours, dotted; the first is where the value goes, or what is asked for. Else what to look at instead."""
    how: str = ""
    """Name of the conversion. Empty: `values`, else the value as it is."""
    note: str = ""
    """Why, or what to know; a clause without a capital and a full stop."""
    values_text: str = ""
    default_text: str = ""
    now: str = ""
    """Of a name that they have given up, today's."""

    @cached_property
    def values(self) -> Mapping[Any, Any]:
        """Return their values by ours; others stay."""
        return {key: value for key, value in self._inside.items() if key not in CONDITIONS}

    @cached_property
    def rule(self) -> Mapping[str, Any]:
        """Return when the value counts, in words of `CONDITIONS`."""
        return {key: value for key, value in self._inside.items() if key in CONDITIONS}

    @cached_property
    def _inside(self) -> Mapping[Any, Any]:
        return yaml.safe_load(self.values_text) if self.values_text else {}

    @cached_property
    def default(self) -> Any:
        """Return theirs, if the row says it."""
        return yaml.safe_load(self.default_text) if self.default_text else NO_DEFAULT


@dataclass(kw_only=True)
class System:
    """Another system, or a job of one that has keys of its own."""

    name: str
    """As its project writes it."""
    groups: dict[str, list[PeerKey]] = field(default_factory=dict)
    """Its keys by what they are about, in the order of docs/coming_from.md."""
    roles: dict[str, str] = field(default_factory=dict)
    """What `<role>` stands for in its keys, by our roles."""
    release: str = ""
    earlier: list[str] = field(default_factory=list)
    """Patterns of keys that the release that was checked hasn't any more."""

    @cached_property
    def rows(self) -> list[PeerKey]:
        """Return all of them; of rows with the same key the first counts."""
        by_key: dict[str, PeerKey] = {}
        for rows in self.groups.values():
            for row in rows:
                by_key.setdefault(row.key, row)
        return list(by_key.values())


FILES = ("roll", "verl", "trl", "openrlhf", "earlier")
DOMAIN = "all"
"""The one domain of a file whose project has none: `<name>` in a place of ours that no `<name>` of theirs fills."""


def read_keys(text: str, systems_read: dict[str, System]) -> None:
    """Add the systems of a `.keys` file; raise `ValueError` with the line that can't be read."""
    reader = _Reader(systems_read)
    for line in _logical(text):
        reader.take(line)
    for system in systems_read.values():
        system.groups = {title: rows for title, rows in system.groups.items() if rows}


def _logical(text: str) -> Iterator[str]:
    """Yield lines with those that go on them; those inside `@each` once for each."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(" ") and lines:
            lines[-1] += " " + line.strip()
        elif line and not line.startswith("#"):
            lines.append(line)
    at = 0
    while at < len(lines):
        if not lines[at].startswith("@each "):
            yield lines[at]
            at += 1
            continue
        end = lines.index("@end", at)
        for pair in lines[at].split()[1:]:
            theirs, ours, *system = pair.split("/")
            yield from (f"@system {name}" for name in system)
            yield from (line.replace("<at>", theirs).replace("<ours>", ours) for line in lines[at + 1 : end])
        at = end + 1


class _Reader:
    def __init__(self, systems_read: dict[str, System]) -> None:
        self._systems = systems_read
        self._short: dict[str, str] = {}
        self._under = ""
        self._group = "Keys"

    def take(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "@system":
            name, _, title = rest.partition(" ")
            self._system = self._systems.setdefault(name, System(name=title))
            self._system.name = title or self._system.name
            self._under, self._group = "", "Keys" if title else self._group
        elif word == "@let":
            name, _, path = rest.partition(" ")
            self._short[name] = path
        elif word == "@role":
            theirs, ours = rest.split()
            self._system.roles[theirs] = ours
        elif word == "@release":
            self._system.release = rest
        elif word == "@earlier":
            self._system.earlier += rest.split()
        elif word == "@under":
            self._under = f"{rest}." if rest else ""
        elif word == "@was":
            above = {row.key: row for rows in self._system.groups.values() for row in rows}
            for old, _, new in (pair.rpartition("/") for pair in rest.split()):
                row = replace(above[new], key=old or new.replace(".", "_"), now=new)
                self._system.groups.setdefault(self._group, []).append(row)
        elif line.startswith("["):
            self._under, self._group = "", line[1:-1]
        else:
            self._system.groups.setdefault(self._group, []).extend(self._read(line))

    def _read(self, line: str) -> Iterator[PeerKey]:
        match = _REASON.fullmatch(line) or _ROW.fullmatch(line)
        if match is None:
            raise ValueError(f"not a row: {line}")
        line_parts = match.groupdict()
        paths = re.sub(r"\$(\w+)", lambda short: self._short[short[1]], line_parts["to"] or "").split()
        for text in line_parts["keys"].split():
            word, _, default = text.partition("=")
            key = self._under + word
            last = key.rpartition(".")[2]
            to = tuple(path[:-1] + last if path.endswith("*") and not path.endswith("**") else path
                       for path in paths)  # fmt: skip
            yield PeerKey(
                key=key, fate=_SIGNS[line_parts["sign"]], to=to if paths or match.re is _REASON else (key,),
                how=line_parts.get("how") or "", values_text=line_parts.get("values") or "",
                default_text=line_parts.get("default") or default, note=line_parts["note"] or "",
            )  # fmt: skip


@cache
def systems() -> dict[str, System]:
    """Return all of them, by the name that `roll migrate --from` takes or the job that is recognised."""
    result: dict[str, System] = {}
    for name in FILES:
        read_keys((Path(__file__).parent / f"{name}.keys").read_text("utf-8"), result)
    return result


def is_earlier(system: str, row: PeerKey) -> bool:
    """Return whether only versions before the release that was checked have a row's key."""
    return bool(row.now) or any(fnmatchcase(row.key, pattern) for pattern in systems()[system].earlier)


def counterparts(row: PeerKey, words: Sequence[str], system: str) -> tuple[str, ...]:
    """Return the places of a row with the roles and names of a key filled in, and `DOMAIN` where it has no name."""
    roles = systems()[system].roles
    names = {"<name>": DOMAIN} | {their: roles.get(word, word) if their == ROLE else word
             for their, word in zip(row.key.split("."), words, strict=False) if their[0] == "<"}  # fmt: skip
    return tuple(".".join(names.get(part, part) for part in path.split(".")) for path in row.to)


_OUR_ROLES = re.compile(
    r"^(actor_train|actor_infer|reference|critic|reward_model|reward_models\.<name>|teacher|teachers\.<name>|judge"
    r"|validation|<role>)(?=\.)"
)
_MANAGERS = ("train_env_manager", "val_env_manager")


def canonical(path: str) -> str:
    """Return a place of ours with every role as `<role>` and both managers of environments as `<manager>`."""
    path = _OUR_ROLES.sub("<role>", path.replace("[]", ""))
    first, dot, rest = path.partition(".")
    return f"<manager>{dot}{rest}" if first in _MANAGERS else path


@cache
def targets() -> frozenset[str]:
    """Return places of ours, canonical, that are the counterpart of some key of another system."""
    return frozenset(canonical(path) for system in systems().values() for row in system.rows for path in row.to)


@cache
def by_word(position: int) -> Mapping[str, tuple[tuple[str, PeerKey], ...]]:
    """Return systems and rows by a word of the key: -1 is the last one, -2 that of the section right above it."""
    result: dict[str, list[tuple[str, PeerKey]]] = {}
    for name, system in systems().items():
        for row in system.rows:
            words = [word for word in row.key.split(".") if word[0] not in "<*"]
            if len(words) > 2 or (words and position == -1):
                result.setdefault(words[position], []).append((name, row))
    return {word: tuple(rows) for word, rows in result.items()}


class Patterns:
    """Finds the row of a dotted path: a literal segment before a role, a role before a name, a name before the rest."""

    def __init__(self, rows: Iterable[PeerKey], roles: Iterable[str] = ()) -> None:
        self._roles = frozenset(roles)
        self.keys: list[str] = []
        """Of the rows, without those that stand for several."""
        self._tree: dict[str, dict] = {}  # type: ignore[type-arg]
        for row in rows:
            self.keys += [row.key] if "*" not in row.key else []
            node = self._tree
            for part in row.key.split("."):
                node = node.setdefault(part, {})
            node.setdefault("", row)  # type: ignore[arg-type]

    def find(self, path: Sequence[str]) -> PeerKey | None:
        """Return the row, or None."""
        return next(iter(self._find(self._tree, path)), None)

    def is_section(self, path: Sequence[str]) -> bool:
        """Return whether there are rows below this path."""
        return any(node.keys() - {""} for node in self._nodes(self._tree, path))

    def is_one_key(self, path: Sequence[str]) -> bool:
        """Return whether a section at this path is one key: it has a row, and no key below it has one of its own."""
        nodes = list(self._nodes(self._tree, path))
        return any("" in node for node in nodes) and not any(node.keys() - {"", "**"} for node in nodes)

    def _branches(self, node: dict, word: str) -> Iterator[dict]:  # type: ignore[type-arg]
        # A node's own row is at "", which a broken key (`a..b`) may name.
        for name, applies in ((word, bool(word)), ("<role>", word in self._roles), ("<manager>", word in _MANAGERS),
                              ("<name>", True)):  # fmt: skip
            if applies and name in node:
                yield node[name]

    def _find(self, node: dict, path: Sequence[str]) -> Iterator[PeerKey]:  # type: ignore[type-arg]
        if not path:
            if "" in node:
                yield node[""]
            return
        for branch in self._branches(node, path[0]):
            yield from self._find(branch, path[1:])
        if "**" in node:
            rest = node["**"]
            if "" in rest:
                yield rest[""]
            for skipped in range(1, len(path)):  # `**.word`
                yield from self._find({key: below for key, below in rest.items() if key}, path[skipped:])

    def _nodes(self, node: dict, path: Sequence[str]) -> Iterator[dict]:  # type: ignore[type-arg]
        if not path:
            yield node
            return
        for branch in self._branches(node, path[0]):
            yield from self._nodes(branch, path[1:])


@cache
def patterns(system: str) -> Patterns:
    """Return the rows of a system, to be found by path."""
    return Patterns(systems()[system].rows, systems()[system].roles)
