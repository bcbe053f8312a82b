"""From a file of another system to a configuration of ours, and a report with every key of the file in one list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roll.workbench.migrate import (
    conversions_roll,
    conversions_tasks,
    conversions_trl,
    openrlhf,
    openrlhf_flags,
    peers,
    verl,
)
from roll.workbench.migrate.conversions import CONVERSIONS, FIRST, LAST, simple
from roll.workbench.migrate.draft import Draft, Step
from roll.workbench.migrate.finish import finish
from roll.workbench.migrate.key_types import UNKNOWN, is_section
from roll.workbench.migrate.report import Report, Use
from roll.workbench.migrate.sources import Source, read_source, unexpanded_in
from roll.workbench.migrate.systems import job_of, name_of, pipeline_of, system_of
from roll.workbench.migrate.table import DOMAIN, NOT_GIVEN, Patterns, Row, patterns, systems
from roll.workbench.migrate.verdict import settle
from roll.workbench.migrate.verl_finish import backends, command_of

MODULES = (conversions_roll, conversions_tasks, conversions_trl, openrlhf, verl)
"""Modules that enter conversions when they are imported."""


def migrate(file: Path, system: str | None = None, *, look: bool = False) -> tuple[Report, dict[str, Any] | None]:
    """Return what became of every key of a file, and the configuration; None for a job that is a command here.

    `look`: also look for the files, models and packages that it names, on this machine.

    Raises `ValueError` (`ConfigError` for YAML) for a file that can't be read or is nobody's.
    """
    source = read_source(file)
    name = system_of(source, system)
    if name == "openrlhf" and not source.job:
        source.job, source.tree = openrlhf_flags.read_tree(source.tree, source.notes)
    report = Report(source=str(file), system=name_of(name))
    if name in ("verl_generation", "verl_evaluation"):
        command_of(name, source, report)
        return report, None
    report.pipeline = pipeline_of(name, source.tree, source.job)
    draft = Draft(report.pipeline, source.tree, report)
    draft.put("pipeline", report.pipeline)
    theirs = peers.defaults(name, source.tree, job_of(name, source))
    draft.memo["theirs"] = theirs
    steps = _steps(draft, source, name, theirs)
    _fill_in(draft, name, theirs, first=True)
    early, others = ([step for step in steps if _comes_first(step.row) is first] for first in (True, False))
    _run(early)
    if name == "verl":
        backends(draft)
    _run(others)
    _remarks(draft, source)
    _fill_in(draft, name, theirs)
    for place, use in draft.memo.get("unexpanded", ()):
        if not draft.has(place):
            draft.put(place, "???", use)
    finish(draft, name)
    _without_ours(draft)
    _ask(draft)
    settle(draft, look=look)
    _fold(report)
    return report, draft.ours


def _steps(draft: Draft, source: Source, system: str, theirs: Mapping[str, Any]) -> list[Step]:
    """Enter every key into the report; return the steps of those that go on."""
    table = patterns(system)
    steps: list[Step] = []
    report = draft.report
    sections: dict[str, Use] = {}
    for path, value in _uses(source.tree, table):
        use = Use(key=path, value=value, fate="absent")
        above = next((place for place in source.sections if path == place or path.startswith(f"{place}.")), None)
        if above is None:
            report.uses.append(use)
        else:
            if above not in sections:
                sections[above] = Use(key=above, value=source.sections[above], fate="translated")
                report.uses.append(sections[above])
            sections[above].parts.append(use)
        step = _step(draft, use, table, system, source, theirs)
        if step is not None:
            steps.append(step)
    return steps


def _uses(tree: Mapping[str, Any], table: Patterns, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Keys with their values: a section is one key where the table takes it whole."""
    for key, value in tree.items():
        below = (*path, key)
        if isinstance(value, Mapping) and value and not table.takes_whole(below):
            yield from _uses(value, table, below)
        else:
            yield ".".join(below), value


def _step(
    draft: Draft, use: Use, table: Patterns, system: str, source: Source, theirs: Mapping[str, Any]
) -> Step | None:
    """The step of a key that goes on; None where its fate is clear."""
    words = use.key.split(".")
    row = table.find(words)
    if (stopped := unexpanded_in(use.value)) and (row is None or row.fate not in ("dead", "quiet")):
        use.fate = "unexpanded"
        places = () if row is None else _places(row, words, system)
        use.note = f"{', '.join(stopped.parts)}{f'; write {places[0]}' if places else ''}"
        use.value = str(stopped)
        if row is not None and row.fate in ("translated", "decided") and draft.knows(places[0]):
            draft.memo.setdefault("unexpanded", []).append((places[0], use))
        return None
    if use.key in source.variables and not draft.knows(use.key):
        use.fate, use.note = "translated", "a name of the file's own: its value stands where it is referred to"
        return None
    if words[-1] == "_target_":
        use.fate, use.note = "dead", "it names a class of verl"
        return None
    if row is None:
        return _unlisted(draft, use, source, table)
    use.fate, use.note = row.fate, row.note
    if use.value == {} and row.fate not in ("dead", "absent"):
        use.fate, use.note = "dead", "an empty section says nothing"
        return None
    if row.fate in ("dead", "quiet", "absent"):
        if row.fate == "absent" and theirs.get(use.key, NOT_GIVEN) == use.value:
            use.fate, use.note = "dead", "their default"
        elif row.fate == "absent" and (_asks_nothing(use.value) or _is_off(source.tree, words)):
            use.fate, use.note = "dead", "it asks for nothing"
        elif row.fate == "absent":
            draft.ask(use, next(iter(_places(row, words, system)), ""))
        return None
    return Step(draft, row, use, _places(row, words, system))


def _asks_nothing(value: Any) -> bool:
    """Whether a value is off, or a section of such."""
    if isinstance(value, Mapping):
        return value.get("enable", True) is False or all(_asks_nothing(entry) for entry in value.values())
    return value is None or value is False or value in ([], "")


def _is_off(tree: Mapping[str, Any], words: list[str]) -> bool:
    """Whether a section around a key is switched off."""
    node: Any = tree
    for word in words[:-1]:
        node = node.get(word) if isinstance(node, Mapping) else None
        if isinstance(node, Mapping) and (node.get("enable", True) is False or ("tool" in node and not node["tool"])):
            return True
    return False


def _unlisted(draft: Draft, use: Use, source: Source, table: Patterns) -> Step | None:
    """A key that no table has: one of ours, a name of the file's own, or unknown."""
    top = use.key.split(".")[0]
    if (top in source.variables or top in source.included) and not draft.knows(top):
        referred = top in source.variables
        use.fate = "translated" if referred else "dead"
        use.note = "a name of the file's own: " + (
            "its value stands where it is referred to" if referred else "nothing refers to it"
        )
    elif use.value in (None, {}) and table.is_section(use.key.split(".")):
        use.fate, use.note = "dead", "an empty section says nothing"
    elif (hint := draft.hint(use.key)) is not UNKNOWN and not is_section(hint):
        use.fate = "translated"
        return Step(draft, Row(key=use.key, fate="translated", to=(use.key,)), use, (use.key,))
    else:
        use.fate, use.note = "absent", "nothing is known about this key"
        draft.ask(use, "")
    return None


def _places(row: Row, words: list[str], system: str) -> tuple[str, ...]:
    """The row's counterparts with roles and names filled in."""
    roles = systems()[system].roles
    stand_ins: dict[str, str] = {"<name>": DOMAIN}
    for pattern, word in zip(row.key.split("."), words, strict=False):
        if pattern == "<role>":
            stand_ins[pattern] = roles.get(word, word)
        elif pattern in ("<name>", "<manager>"):
            stand_ins[pattern] = word
    return tuple(".".join(stand_ins.get(part, part) for part in place.split(".")) for place in row.to)


def _run(steps: list[Step]) -> None:
    """Carry out steps, those that look at others last."""
    for step in [step for step in steps if step.row.how not in LAST]:
        _carry_out(step)
    for step in [step for step in steps if step.row.how in LAST]:
        _carry_out(step)


def _carry_out(step: Step) -> None:
    try:
        CONVERSIONS.get(step.row.how, simple)(step)
    except (TypeError, AttributeError, LookupError, ValueError, ArithmeticError) as error:
        # A value of a kind that nobody writes there: the file's author is told, not shown a traceback.
        step.absent(f"its value can't be read as this key's: {error}")


def _comes_first(row: Row) -> bool:
    return row.how in FIRST or row.key.endswith((".strategy", "track_with"))


def _remarks(draft: Draft, source: Source) -> None:
    """What isn't a key with a value."""
    report = draft.report
    for key in source.deleted:
        report.uses.append(Use(key=f"~{key}", value=None, fate="dead", note="a key that is taken out"))
    for key, value in source.choices:
        report.uses.append(Use(key=key, value=value, fate="dead", note="the defaults of verl that this chooses"))
    for key, value in source.conflicts:
        note = "a key above it has a value itself"
        report.uses.append(Use(key=key, value=value, fate="absent", note=note))
    for entry in source.absent:
        report.missing.append(f"defaults: there is no file {entry}; put it where the job looks for it, or remove it")
    report.decisions += source.notes
    report.decisions += [f"{entry} is the preset of that name that comes with this package" for entry in source.presets]


def _fill_in(draft: Draft, system: str, theirs: Mapping[str, Any], *, first: bool = False) -> None:
    """Write out what they take for keys that the file leaves out.

    `first`: only those that other conversions look at.
    """
    steps = []
    for key, value, row in _left_out(draft, system, theirs):
        if _comes_first(row) is not first or draft.their(key) is not None or _is_used(draft, key):
            continue
        use = Use(key=key, value=value, fate="translated", note=row.note if row.fate == "decided" else "")
        step = Step(draft, row, use, _places(row, key.split("."), system))
        if _wanted(draft, step):
            draft.report.filled.append(use)
            steps.append(step)
    _run(steps)
    draft.report.filled = [use for use in draft.report.filled if use.ours]


def _left_out(draft: Draft, system: str, theirs: Mapping[str, Any]) -> Iterator[tuple[str, Any, Row]]:
    """Keys with their defaults: those of the project's table, or that a row says."""
    table = patterns(system)
    given = {".".join(words[: end + 1]) for use in draft.report.uses for words in [use.key.split(".")]
             for end in range(len(words))}  # fmt: skip
    for key, value in theirs.items():
        row = table.find(key.split(".")) if key not in given else None
        if row is not None and row.fate in ("translated", "decided"):
            yield key, value, row
    for row in systems()[system].rows:
        if row.default is not NOT_GIVEN:
            for key in _instances(row.key, draft, systems()[system].roles):
                if key not in theirs:
                    yield key, row.default, row


def _without_ours(draft: Draft) -> None:
    """Leave out of the new file what it leaves to their defaults and is the default here too."""
    for use in draft.report.filled:
        for place in use.ours:
            if draft.made_by.get(place) is use and draft.get(place) == draft.default(place):
                draft.drop(place)
                use.ours = tuple(other for other in use.ours if other != place)
    draft.report.filled = [use for use in draft.report.filled if use.ours]


def _ask(draft: Draft) -> None:
    """Have the new file ask where a key that changes the training has no counterpart."""
    for use, place in draft.memo.get("asked", ()):
        # A default that is off asks for nothing.
        if use.fate == "absent" and (use in draft.report.uses or use.value not in (None, False, [], {}, "")):
            draft.put(place, "???", use)
            use.ours = (*use.ours, place) if place not in use.ours else use.ours
            draft.report.missing.append(f"{place}: {use.line().partition(' -> ')[0]}: {use.note}")


def _instances(key: str, draft: Draft, roles: Mapping[str, str]) -> list[str]:
    """The key for every role or manager that the file has."""
    for placeholder, names in (("<role>", roles), ("<manager>", ("train_env_manager", "val_env_manager"))):
        if placeholder in key.split("."):
            return [key.replace(placeholder, name) for name in names if isinstance(draft.theirs.get(name), Mapping)]
    return [] if "<name>" in key else [key]


def _is_used(draft: Draft, key: str) -> bool:
    return any(use.key == key for use in draft.report.uses)


def _wanted(draft: Draft, step: Step) -> bool:
    """Whether a default is of something that the file has, and nothing else has said it."""
    if not draft.knows(step.place) or draft.has(step.place):
        return False
    role = step.role
    if role in ("critic", "reference", "teacher", "judge", "reward_model", "validation", "val_env_manager"):
        return draft.has(role)
    if step.use.key.endswith((".top_p", ".top_k", ".temperature")):
        return step.use.key.split(".")[0] == "actor_infer" or draft.has(role)
    return True


def _fold(report: Report) -> None:
    """Say once what several steps said about one key."""
    for use in report.uses:
        for part in use.parts:
            use.ours += part.ours
            if part.fate != "translated" and part.fate != "dead":
                use.fate = "decided"
                use.note += f"{'; ' if use.note else ''}{part.key.removeprefix(use.key).lstrip('.')}: {part.note}"
        if use.parts and not use.ours and use.fate == "translated":
            use.fate, use.note = "dead", use.parts[0].note
        use.ours = tuple(dict.fromkeys(use.ours))
        if use.fate == "translated" and not use.ours and not use.note:
            use.note = "the default here too"
    report.missing = list(dict.fromkeys(report.missing))
    report.decisions = list(dict.fromkeys(report.decisions))
