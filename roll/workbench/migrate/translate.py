"""From a file of another system to a configuration of ours, and a report with every key of the file in one list."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roll.workbench.migrate import (
    alibaba_roll,
    alibaba_roll_tasks,
    openrlhf,
    openrlhf_flags,
    peers,
    trl,
    trl_policies,
    verl,
    verl_algorithm,
)
from roll.workbench.migrate.conversions import CONVERSIONS, FIRST, LAST, simple
from roll.workbench.migrate.draft import UNKNOWN, Draft, Step, is_section
from roll.workbench.migrate.finish import finish, settle
from roll.workbench.migrate.overrides import at, unexpanded_in
from roll.workbench.migrate.report import KeyUse, MigrationReport
from roll.workbench.migrate.sources import PeerFile, read_source
from roll.workbench.migrate.systems import job_of, pipeline_of, system_of
from roll.workbench.migrate.table import NO_DEFAULT, Patterns, PeerKey, counterparts, patterns, systems
from roll.workbench.migrate.verl_finish import backends, command_of

MODULES = (alibaba_roll, alibaba_roll_tasks, openrlhf, trl, trl_policies, verl, verl_algorithm)
"""Modules that enter conversions when they are imported."""
_UNREADABLE = (TypeError, AttributeError, LookupError, ArithmeticError, ValueError)
"""What a conversion raises for a value of a kind that nobody writes there."""
_HINTED = 40
"""Keys to ask for up to which unknown ones are compared with all known ones."""


def migrate(
    file: Path, system: str | None = None, *, look: bool = False
) -> tuple[MigrationReport, dict[str, Any] | None]:
    """Return what became of every key of a file, and the configuration; None for a job that is a command here.

    `look`: also look for the files, models and packages that it names, on this machine.

    Raises `ValueError` (`ConfigError` for YAML) for a file that can't be read or is nobody's.
    """
    source = read_source(file)
    name = system_of(source, system)
    if name == "openrlhf" and not source.job:
        source.job, source.tree = openrlhf_flags.read_tree(source.tree, source.notes)
    report = MigrationReport(source=str(file), system=systems()[name].name)
    if name in ("verl_generation", "verl_evaluation"):
        command_of(name, source, report)
        return report, None
    report.pipeline = pipeline_of(name, source.tree, source.job)
    draft = Draft(report.pipeline, source.tree, report)
    draft.put("pipeline", report.pipeline)
    theirs = peers.defaults(name, source.tree, job_of(name, source))
    draft.job, draft.processes, draft.peer_defaults = source.job, source.processes, theirs
    steps = list(_steps(draft, source, name, theirs))
    _remarks(draft, source)
    _fill_in(draft, name, theirs, first=True)
    _run([step for step in steps if _comes_first(step.row)])
    if name == "verl":
        backends(draft)
    _run([step for step in steps if not _comes_first(step.row)])
    _fill_in(draft, name, theirs)
    for key_path, use in draft.unexpanded:
        if not draft.has(key_path):
            draft.put(key_path, "???", use)
    try:
        finish(draft, name)
    except _UNREADABLE as error:
        draft.ask(use := KeyUse(key="(the file as a whole)", value=None, fate="absent", note=str(error)), "")
        use.note = f"devices and batches can't be worked out from its values: {error}"
        report.uses.append(use)
    _without_ours(draft)
    _put_placeholders(draft)
    settle(draft, look=look)
    report.fold()
    return report, draft.ours


def _steps(draft: Draft, source: PeerFile, system: str, theirs: Mapping[str, Any]) -> Iterator[Step]:
    """Enter every key into the report; return the steps of those that go on."""
    table = patterns(system)
    sections: dict[str, KeyUse] = {}
    for path, value in _uses(source.tree, table):
        use = KeyUse(key=path, value=value, fate="absent")
        above = next(
            (section for section in source.sections if path == section or path.startswith(f"{section}.")), None
        )
        if above is None:
            draft.report.uses.append(use)
        else:
            if above not in sections:
                sections[above] = KeyUse(key=above, value=source.sections[above], fate="translated")
                draft.report.uses.append(sections[above])
            sections[above].parts.append(use)
        if (step := _step(draft, use, table, system, source, theirs)) is not None:
            yield step


def _uses(tree: Mapping[str, Any], table: Patterns, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield keys with their values: a section is one key where the table takes it whole."""
    for key, value in tree.items():
        below = (*path, key)
        if isinstance(value, Mapping) and value and not table.is_one_key(below):
            yield from _uses(value, table, below)
        else:
            yield ".".join(below), value


def _step(
    draft: Draft, use: KeyUse, table: Patterns, system: str, source: PeerFile, theirs: Mapping[str, Any]
) -> Step | None:
    """Return the step of a key that goes on; None where its fate is clear."""
    words = use.key.split(".")
    row = table.find(words)
    key_paths = () if row is None else counterparts(row, words, system)
    if (stopped := unexpanded_in(use.value)) and (row is None or row.fate not in ("dead", "quiet")):
        use.fate, use.value = "unexpanded", str(stopped)
        use.note = f"{', '.join(stopped.parts)}{f'; write {key_paths[0]}' if key_paths else ''}"
        if row is not None and row.fate in ("translated", "decided") and draft.knows(key_paths[0]):
            draft.unexpanded.append((key_paths[0], use))
        else:
            draft.ask(use, key_paths[0] if key_paths else "")
    elif _is_own_name(use.key, row, source) and not draft.knows(use.key):
        use.fate, use.note = "translated", "a name of the file's own: its value stands where it is referred to"
    elif words[-1] == "_target_":
        use.fate, use.note = "dead", "it names a class of verl"
    elif row is None:
        return _unlisted(draft, use, source, table)
    elif use.value == {}:
        use.fate, use.note = "dead", "an empty section says nothing"
    else:
        use.fate, use.note = row.fate, row.note
        if row.fate in ("translated", "decided"):
            return Step(draft, row, use, key_paths)
        if row.fate == "absent" and (why := _why_unneeded(use, row, source.tree, theirs)):
            use.fate, use.note = "dead", why
        elif row.fate == "absent":
            draft.ask(use, key_paths[0] if key_paths else "")
    return None


def _is_own_name(key: str, row: PeerKey | None, source: PeerFile) -> bool:
    """Return whether other keys refer to a key that is nobody's, or to a section that it stands in."""
    words = key.split(".")
    if row is not None:
        return (row.fate in ("dead", "quiet") or row.how == "nothing") and key in source.variables
    return any(".".join(words[:end]) in source.variables for end in range(1, len(words) + 1))


def _why_unneeded(use: KeyUse, row: PeerKey, tree: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return why a key without a counterpart needs nothing, or empty: it has their default, or its section is off."""
    words = use.key.split(".")
    for end in range(1, len(words)):
        section = ".".join(words[:end])
        if at(tree, f"{section}.enable", theirs.get(f"{section}.enable", True)) is False:
            return f"{section}.enable is false"
    default = theirs.get(use.key, row.default)
    if default is not NO_DEFAULT:
        return "their default" if default == use.value and isinstance(default, bool) is isinstance(use.value, bool) \
            else ""  # fmt: skip
    if isinstance(use.value, Mapping):
        return "it is off" if use.value.get("enable") is False else ""
    # Of a name of the user's own, a variable of a chat template for one, false is a value like others.
    free = row.key.endswith("**") or "<name>" in row.key
    return "it asks for nothing" if use.value in (None, [], "") or (use.value is False and not free) else ""


def _unlisted(draft: Draft, use: KeyUse, source: PeerFile, table: Patterns) -> Step | None:
    """Return a key that no table has: one of ours, a name of an included file's, or unknown."""
    words = use.key.split(".")
    if (hint := draft.hint(use.key)) is not UNKNOWN and not is_section(hint):
        use.fate = "translated"
        return Step(draft, PeerKey(key=use.key, fate="translated", to=(use.key,)), use, (use.key,))
    if words[0] in source.included and not draft.knows(words[0]) and not table.is_section(words[:1]):
        use.fate, use.note = "dead", "a name of an included file's: nothing refers to it"
    elif use.value in (None, {}) and table.is_section(words):
        use.fate, use.note = "dead", "an empty section says nothing"
    else:
        near = _nearest(table, use.key) if len(draft.unresolved) < _HINTED else ""
        use.note = f"nothing is known about this key{near}"
        draft.ask(use, "")
    return None


def _nearest(table: Patterns, key: str) -> str:
    """Return `; did you mean x?` with the nearest key of a row: in the same section, else with the same last word."""
    section, _, last = key.rpartition(".")
    beside = [row for row in table.keys if row.rpartition(".")[0] == section and row != key]
    near = difflib.get_close_matches(key, beside, n=1, cutoff=0.85) if len(last) < 80 else []
    near = near or difflib.get_close_matches(
        key, [row for row in table.keys if row.rpartition(".")[2] == last and row != key], n=1, cutoff=0.6
    )
    return f"; did you mean {near[0]}?" if near else ""


def _run(steps: list[Step]) -> None:
    """Carry out steps, those that look at others last."""
    for step in sorted(steps, key=lambda step: step.row.how in LAST):
        try:
            CONVERSIONS.get(step.row.how, simple)(step)
        except _UNREADABLE as error:
            step.absent(f"its value can't be read as this key's: {error}")


def _comes_first(row: PeerKey) -> bool:
    return row.how in FIRST or row.key.endswith((".strategy", "track_with"))


def _remarks(draft: Draft, source: PeerFile) -> None:
    """Note what isn't a key with a value."""
    report = draft.report
    for key in source.deleted:
        report.uses.append(KeyUse(key=f"~{key}", value=None, fate="dead", note="a key that is taken out"))
    for key, value in source.choices:
        report.uses.append(KeyUse(key=key, value=value, fate="dead", note="the defaults of verl that this chooses"))
    for key, value in source.conflicts:
        use = KeyUse(key=key, value=value, fate="absent", note="a key above it has a value itself")
        report.uses.append(use)
        draft.ask(use, "")
    report.missing += [f"there is no file {entry}, which it reads: put it where the job looks for it, or remove it"
                       for entry in source.absent]  # fmt: skip
    report.decisions += source.notes
    report.decisions += [f"{entry} is the preset of that name that comes with this package" for entry in source.presets]


def _fill_in(draft: Draft, system: str, theirs: Mapping[str, Any], *, first: bool = False) -> None:
    """Write out what they take for keys that the file leaves out.

    `first`: only those that other conversions look at.
    """
    steps = []
    for key, value, row in _left_out(draft, system, theirs):
        if _comes_first(row) is not first:
            continue
        use = KeyUse(key=key, value=value, fate="translated", note=row.note if row.fate == "decided" else "")
        step = Step(draft, row, use, counterparts(row, key.split("."), system))
        if _wanted(draft, step):
            draft.report.filled.append(use)
            steps.append(step)
    _run(steps)
    draft.report.filled = [use for use in draft.report.filled if use.ours]


def _left_out(draft: Draft, system: str, theirs: Mapping[str, Any]) -> Iterator[tuple[str, Any, PeerKey]]:
    """Yield keys with their defaults: those of the project's table, or that a row says."""
    table = patterns(system)
    explicit = {".".join(words[: end + 1]) for use in draft.report.uses for words in [use.key.lstrip("~").split(".")]
                for end in range(len(words))}  # fmt: skip
    for key, value in theirs.items():
        row = table.find(key.split(".")) if key not in explicit and draft.their(key) is None else None
        if row is not None and row.fate in ("translated", "decided"):
            yield key, value, row
    for row in systems()[system].rows:
        if row.default is NO_DEFAULT or row.fate not in ("translated", "decided"):
            continue
        for key in _instances(row.key, draft, systems()[system].roles):
            if key not in theirs and key not in explicit and draft.their(key) is None:
                yield key, row.default, row


def _instances(key: str, draft: Draft, roles: Mapping[str, str]) -> list[str]:
    """Return the key for every role or manager that the file has."""
    for placeholder, names in (("<role>", roles), ("<manager>", ("train_env_manager", "val_env_manager"))):
        if placeholder in key.split("."):
            return [key.replace(placeholder, name) for name in names if isinstance(draft.theirs.get(name), Mapping)]
    return [] if "<name>" in key else [key]


def _wanted(draft: Draft, step: Step) -> bool:
    """Return whether a default is of something that the file has, and nothing else has said it."""
    if not draft.knows(step.key_path) or draft.has(step.key_path):
        return False
    if step.role in ("critic", "reference", "teacher", "judge", "reward_model", "validation", "val_env_manager"):
        return draft.has(step.role)
    if step.use.key.endswith((".top_p", ".top_k", ".temperature")):
        return step.use.key.split(".")[0] == "actor_infer" or draft.has(step.role)
    return True


def _without_ours(draft: Draft) -> None:
    """Leave out of the new file what it leaves to their defaults and is the default here too."""
    for use in draft.report.filled:
        for key_path in use.ours:
            if draft.made_by.get(key_path) is use and draft.get(key_path) == draft.default(key_path):
                draft.drop(key_path)
                use.ours = tuple(other for other in use.ours if other != key_path)
    draft.report.filled = [use for use in draft.report.filled if use.ours]


def _put_placeholders(draft: Draft) -> None:
    """Have the new file ask where a key that changes the training has no counterpart."""
    report = draft.report
    of_file = {id(use) for use in [*report.uses, *(part for use in report.uses for part in use.parts)]}
    for use, key_path in draft.unresolved:
        # A default of theirs that is off asks for nothing.
        if use.fate in ("absent", "unexpanded") and (id(use) in of_file or use.value not in (None, False, [], {}, "")):
            if id(use) not in of_file and not any(use is other for other in report.filled):
                report.filled.append(use)
            # What other keys have written into a section stays.
            key_path = (
                "exp_name" if isinstance(draft.get(key_path), dict) and is_section(draft.hint(key_path)) else key_path
            )
            draft.put(key_path, "???", use)
            use.ours = (*use.ours, key_path) if key_path not in use.ours else use.ours
            draft.report.missing.append(f"{key_path}: {use.line().partition(' -> ')[0]}: {use.note}")
