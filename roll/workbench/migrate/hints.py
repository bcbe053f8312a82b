"""Hints for keys of other systems, from the same tables that `roll migrate` translates by."""

from __future__ import annotations

from collections.abc import Sequence

from roll.workbench.migrate.table import ROLE, PeerKey, by_word, canonical, patterns, systems

_OFFLINE = "Fine-tuning, preferences, distillation"
_SHOWN = 3
"""Counterparts that one hint names."""
_USE_MIGRATE = "roll migrate translates the whole file"


def foreign_hint(path: str, role: str = "", *, offline: bool = False) -> str:
    """Return what to write in place of a key that isn't one here, if it is of another system; else nothing.

    `path` is the key as it stands, dotted; `role` the section of ours that it stands in; `offline`: in a pipeline that
    learns from finished rows.
    """
    return exact_hint(path, offline=offline) or _by_last_word(path.split("."), role, offline=offline)


def exact_hint(path: str, *, offline: bool = False) -> str:
    """Return what to write in place of a key that another system has at this very place, if it is another one here."""
    words = path.split(".")
    for name in sorted(systems(), key=lambda system: offline and system != "verl_sft"):
        row = patterns(name).find(words)
        if row is None or row.now or row.key.endswith("**") or not _suits(name, row, offline):
            continue
        key_paths = _filled(row, words, name)
        if row.fate in ("dead", "quiet", "absent") or (key_paths and key_paths[0] != path):
            return _sentence(row, words, name) + (also(words, key_paths) if row.fate == "translated" else "")
    return ""


def _suits(system: str, row: PeerKey, offline: bool) -> bool:
    """Return whether a row is of the pipelines that the file is for."""
    of_rows = system == "verl_sft" or row in systems()["roll"].groups[_OFFLINE]
    return offline or not of_rows


def also(words: Sequence[str], elsewhere: Sequence[str]) -> str:
    """Return what a word at the top level that is a key of a section here may mean besides, by other systems."""
    if len(words) > 1:
        return ""
    known = {canonical(key_path) for key_path in elsewhere}
    rows = {canonical(row.to[0]): (name, row) for name, row in reversed(by_word(-1).get(words[0], ()))
            if row.to and row.fate == "translated" and canonical(row.to[0]) not in known}  # fmt: skip
    parts = [f"; {systems()[name].name}'s {_shown(row.key)} is {_shown(row.to[0])}" for name, row in rows.values()]
    return "".join(list(reversed(parts))[:_SHOWN])


def is_foreign_section(words: Sequence[str]) -> bool:
    """Return whether keys of another system stand below this path."""
    return any(patterns(name).is_section(list(words)) for name in systems())


def section_hint(words: Sequence[str]) -> str:
    """Return where the keys below a section of another system are here."""
    if not is_foreign_section(words):
        return ""
    path, hints = ".".join(words), []
    for system in systems().values():
        rows = [row for row in system.rows if row.key.startswith(f"{path}.") and row.fate == "translated" and row.to]
        rows = [row for row in rows if "*" not in row.key and not row.to[0].startswith("-")]
        if rows:
            pairs = [f"{row.key.removeprefix(path).lstrip('.')} is {row.to[0]}" for row in rows[:_SHOWN]]
            hints.append(f"a section of {system.name}; its keys are elsewhere here: {', '.join(pairs)}, ...")
    return f"{hints[0]} ({_USE_MIGRATE})" if hints else ""


def unneeded(path: Sequence[str]) -> str:
    """Return why nothing here needs a key of ROLL, or nothing. A catch-all says nothing about a single key."""
    row = patterns("roll").find(path)
    return row.note if row is not None and row.fate == "dead" and not row.key.endswith("**") else ""


def _by_last_word(words: Sequence[str], role: str, *, offline: bool) -> str:
    """Return a hint by the last word of the key, for one that has lost the sections around it."""
    general = ("**",) if len(words) == 1 else ("**", "tracker_kwargs.")
    rows = [(name, row) for name, row in by_word(-1).get(words[-1], ()) if not row.key.startswith(general)
            and (len(words) == 1 or row.to[:1] != ("tracker_kwargs",))
            and _filled(row, words, name)[:1] != [".".join(words)]]  # fmt: skip
    rows = [match for match in rows if _suits(*match, offline)] or rows
    rows = [match for match in rows if not match[1].now] or rows
    if not rows:
        inside = by_word(-2).get(words[-1])
        return _sentence(inside[0][1], words, inside[0][0]) if inside else ""
    # Most of the same words at the end first; then keys that have a counterpart, of another last word (a key of the
    # same one would rarely be unknown), in the section that the key stands in.
    nearest = max(_common(words, row) for _, row in rows)
    best = sorted((match for match in rows if _common(words, match[1]) == nearest), key=lambda match: (
        not any(key_path.startswith(f"{role}.") for key_path in match[1].to) if role else False, not match[1].to,
        match[1].fate in ("absent", "quiet"), any(key_path.rpartition(".")[2] == words[-1] for key_path in match[1].to),
    ))  # fmt: skip
    answers: dict[str, tuple[str, PeerKey]] = {}
    for match in best:
        if match[1].to and match[1].fate in ("translated", "decided"):
            answers.setdefault(canonical(match[1].to[0]), match)
    (name, first), *others = list(answers.values())[:_SHOWN] or best[:1]
    also = [f"; {systems()[name].name}'s {_shown(row.key)} is {_shown(row.to[0])}" for name, row in others]
    return _sentence(first, words, name) + "".join(also)


def _common(words: Sequence[str], row: PeerKey) -> int:
    """Return how many words at the end of a key are those of the row."""
    pairs = zip(reversed(words), reversed(row.key.split(".")), strict=False)
    return next((count for count, (mine, their) in enumerate(pairs) if mine != their), len(words))


def _sentence(row: PeerKey, words: Sequence[str], system: str) -> str:
    """Return what to do with a key, in words."""
    if system.startswith("verl_") and row.to and row.to[0].startswith(("-", "DATA", "FILE")):
        return f"it is of a job that is a command here: roll eval; {row.to[0]}"
    key_paths = [_shown(key_path) for key_path in _filled(row, words, system)]
    if row.fate in ("translated", "decided") and key_paths:
        note = f"; {row.note}" if row.note else ""
        changed = [f"{theirs} is {ours}" for theirs, ours in row.values.items() if theirs not in (None, ours)]
        values = f" ({', '.join(changed[:_SHOWN])})" if changed and not note else ""
        return f"write {' and '.join(key_paths[:2])}{values}{note}"
    see = (
        f"; see {' and '.join(key_paths[:2])}"
        if key_paths and not any(key_path in row.note for key_path in key_paths)
        else ""
    )
    return f"remove it: {row.note}{see}"


def _filled(row: PeerKey, words: Sequence[str], system: str) -> list[str]:
    """Return counterparts, with the role that the key stands in."""
    roles = systems()[system].roles
    role = next((roles[mine] for their, mine in zip(row.key.split("."), words, strict=False)
                 if their == ROLE and mine in roles), "")  # fmt: skip
    return [key_path.replace(ROLE, role) if role else key_path.removeprefix(f"{ROLE}.") for key_path in row.to]


def _shown(key_path: str) -> str:
    named = key_path.replace("<name>", "<domain>" if "rewards" in key_path else "<tag>")
    return named.replace("<manager>", "train_env_manager")
