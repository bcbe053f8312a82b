"""`roll migrate --explain KEY`: what a key of another project is here or why it isn't, and what becomes one of ours."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.configs.errors import nearest
from roll.configs.parsing.loader import PIPELINES
from roll.configs.parsing.schema_places import homes_of
from roll.utils.terminal import printable
from roll.workbench.migrate import peers
from roll.workbench.migrate.draft import UNKNOWN, Draft
from roll.workbench.migrate.report import TITLES, MigrationReport, shown
from roll.workbench.migrate.table import NO_DEFAULT, PeerKey, canonical, counterparts, is_earlier, patterns, systems
from roll.workbench.migrate.translate import CONVERSIONS

_LISTED = 4  # keys of one project with the same words that the text explains one by one
_HERE = ("translated", "decided")
_CLASSES: tuple[type, ...] = tuple(PIPELINES.values())


@dataclass(frozen=True, kw_only=True)
class KeyExplanation:
    """A key of another project, or one of ours (`fate` is `ours`) with those that become it."""

    key: str
    fate: str = "ours"
    project: str = ""  # whose key it is, with the release that this was checked with
    earlier: str = ""  # where only versions before that release have it: that, or its name now
    ours: tuple[str, ...] = ()
    value: str = ""  # what becomes of it, in words
    note: str = ""
    their_default: dict[str, Any] = field(default_factory=dict)  # by TRL's classes, OpenRLHF's scripts, verl's jobs
    our_default: Any = UNKNOWN
    theirs: dict[str, list[str]] = field(default_factory=dict)  # keys by project


def explain(text: str, project: str | None = None) -> list[KeyExplanation]:
    """Return what is known of a key or flag, as it is typed; raise `ValueError` with the nearest names if nothing is.

    `project`: look at keys of this one alone, by the name that `--from` takes.
    """
    key = text.strip().lstrip("-+~").partition("=")[0].strip()
    names = [name for name in systems() if project is None or name.partition("_")[0] == project]
    for words in dict.fromkeys((tuple(key.split(".")), tuple(key.replace("-", "_").split(".")))):
        if not all(words) or not key.strip("*."):
            break
        ours = [] if project else list(_ours(".".join(words)))
        if results := ours + [answer for name in names for answer in _theirs(name, words)]:
            return results
    known = {word for name in names for key in _keys(name) for word in (key, key.rpartition(".")[2])}
    known |= {word for cls in _CLASSES for word in homes_of(cls)}
    known = {word for word in known if word.strip("*.")}
    near = nearest(key, known) or nearest(key.rpartition(".")[2], known)
    whose = systems()[project].name if project else "ROLL, verl, TRL or OpenRLHF, nor of ours"
    raise ValueError(f"{shown(key)!r} is no key of {whose}{near and f'; {near}'}")


def _title(system: str) -> str:
    return f"{systems()[system].name} {peers.release(system) or systems()[system].release}".strip()


def _keys(system: str) -> list[str]:
    rows = [row.key for row in systems()[system].rows if row.key.strip("*.")]
    return list(dict.fromkeys([*rows, *(key for job in peers.jobs(system).values() for key in job)]))


def _theirs(system: str, words: Sequence[str]) -> Iterator[KeyExplanation]:
    """Return the key at this path, else all that end with these words, else those of the section that they name."""
    path, keys, rows = ".".join(words), _keys(system), patterns(system)
    row = rows.find(words)
    if row.key.strip("*.") if row else path in keys and not rows.is_section(words):
        return iter([_answer(system, path, row)])
    near = [key for key in keys if key.endswith(f".{path}")] or [key for key in keys if f".{path}." in f".{key}"]
    return (_answer(system, key, rows.find(key.split("."))) for key in near)


def _subject(docstring: str) -> str:
    """Return what a conversion translates, by the first line of its docstring."""
    text = docstring.partition("\n")[0].rstrip(".").removeprefix("Translate ")
    return text[:1].upper() + text[1:]


def _answer(system: str, key: str, row: PeerKey | None) -> KeyExplanation:
    theirs = {job: keys[key][1] for job, keys in peers.jobs(system).items() if key in keys}
    if row is None:
        note = "nothing is known about this key"
        return KeyExplanation(key=key, fate="absent", project=_title(system), note=note, their_default=theirs)
    theirs |= {system: row.default} if not theirs and row.default is not NO_DEFAULT else {}
    how = "" if row.how in ("", "nothing") else getattr(CONVERSIONS.get(row.how), "__doc__", None) or ""
    values = [f"{shown(theirs)} is {shown(ours)}" for theirs, ours in row.values.items()]
    key_paths = counterparts(row, key.split("."), system)
    return KeyExplanation(
        key=key, fate=row.fate, project=_title(system), ours=key_paths, note=row.note,
        earlier=f"now {row.now}" if row.now else "of earlier versions" * is_earlier(system, row),
        value=", ".join(values) or _subject(how), their_default=theirs,
        our_default=_default(*key_paths[:1]) if row.fate in _HERE else UNKNOWN,
    )  # fmt: skip


def _default(key_path: str = "") -> Any:
    """Return what the first pipeline that has a key of ours takes where nobody writes it."""
    key_path = key_path.replace("<role>", "actor_train").replace("<manager>", "train_env_manager")
    values = (Draft(pipeline, {}, MigrationReport(source="", system="")).default(key_path) for pipeline in PIPELINES)
    return next((value for value in values if value is None or isinstance(value, (str, int, float))), UNKNOWN)


def _ours(path: str) -> Iterator[KeyExplanation]:
    last = path.rpartition(".")[2]
    paths = dict.fromkeys(key_path for cls in _CLASSES for key_path in homes_of(cls).get(last, ())
                           if f".{key_path}".endswith(f".{path}"))  # fmt: skip
    for key_path in [path] if path in paths else paths:
        theirs = {_title(name): [row.key for row in system.rows if row.fate in _HERE
                                 and canonical(key_path) in map(canonical, row.to)]
                  for name, system in systems().items()}  # fmt: skip
        theirs = {title: keys for title, keys in theirs.items() if keys}
        yield KeyExplanation(key=key_path, our_default=_default(key_path), theirs=theirs)


def as_text(answers: Sequence[KeyExplanation]) -> str:
    """Return some lines for each, and for many of one project only the names of the rest."""
    lines: list[str] = []
    for project in dict.fromkeys(answer.project for answer in answers):
        mine = [answer for answer in answers if answer.project == project]
        lines += [line for answer in mine[:_LISTED] for line in _lines(answer)]
        if rest := [answer.key for answer in mine[_LISTED:]]:
            lines.append(f"{project or 'here'}, likewise: {', '.join(rest[:12])}{', ...' if len(rest) > 12 else ''}")
    return printable("\n".join(lines) + "\n")


def _lines(answer: KeyExplanation) -> Iterator[str]:
    ours = "" if answer.our_default is UNKNOWN else shown(answer.our_default)
    if answer.fate == "ours":
        yield f"{answer.key}: a key here{f', by default {ours}' if ours else ''}"
        yield from (f"  {project}: {', '.join(keys)}" for project, keys in answer.theirs.items())
        return
    joined = " and ".join(answer.ours)
    arrow = f" -> {joined}" if answer.fate in _HERE and joined else ""
    yield f"{answer.project}: {answer.key}{arrow}{f' ({answer.earlier})' if answer.earlier else ''}"
    fate = "" if answer.fate == "translated" else TITLES[answer.fate]
    if reason := ": ".join(filter(None, (fate, answer.note))):
        yield f"  {reason}{f' (see {joined})' if joined and not arrow else ''}"
    if answer.value and not (answer.note and " is " in answer.value):
        yield f"  value: {answer.value}"
    jobs: dict[str, list[str]] = {}
    for job, value in answer.their_default.items():
        jobs.setdefault(shown(value), []).append(job)
    defaults = [f"{value} ({', '.join(names)})" if len(jobs) > 1 else value for value, names in jobs.items()]
    if defaults:
        yield f"  by default: {', '.join(defaults)} there{f', {ours} here' if ours else ''}"


def as_json(answers: Sequence[KeyExplanation]) -> str:
    """Return all of them for programs."""
    known = [{name: value for name, value in vars(answer).items() if value is not UNKNOWN} for answer in answers]
    return json.dumps(known, indent=2, ensure_ascii=False, default=str) + "\n"
