"""Whether what was written passes `roll check`: keys that would do nothing are taken out, the rest is named."""

from __future__ import annotations

from roll.configs.checks.prerequisites import prerequisite_violations
from roll.configs.errors import NO_VALUE, ConfigError, Violation
from roll.configs.parsing.loader import Reading, read_tree
from roll.workbench.migrate.draft import Draft
from roll.workbench.migrate.report import masked

_ROUNDS = 20
_IDLE = ("this key acts only", "this key has no effect")
"""How the rules begin what they say of a key that would do nothing."""


def settle(draft: Draft, *, look: bool) -> None:
    """Take out keys that would do nothing here, and put what is left to do into the report.

    `look`: also look for the files, models and packages that it names, on this machine.
    """
    reading = None
    for _ in range(_ROUNDS):
        reading = _read(draft)
        if reading is None:
            return
        idle = [violation for violation in reading.violations if violation.problem.startswith(_IDLE)]
        if not any(_take_out(draft, violation) for violation in idle):
            break
    assert reading is not None
    draft.report.missing += [_line(violation) for violation in reading.violations if not _told(draft, violation)]
    if look and reading.config is not None and reading.sound and not reading.violations:
        _look_around(draft, reading)


def _read(draft: Draft) -> Reading | None:
    try:
        return read_tree(draft.ours, "")
    except ConfigError as error:
        draft.report.missing += [_line(violation) for violation in error.violations]
        return None


def _take_out(draft: Draft, violation: Violation) -> bool:
    """Take out the key; whether there was one."""
    if not draft.has(violation.path):
        return False
    why = violation.problem.removeprefix("this key ").partition(";")[0]
    for use in draft.uses_below(violation.path):
        use.note = why
    draft.abandon(violation.path, why)
    return True


def _told(draft: Draft, violation: Violation) -> bool:
    return any(line.startswith(violation.path.partition("[")[0]) for line in draft.report.missing)


def _line(violation: Violation) -> str:
    value = "" if violation.value is NO_VALUE else f" (it is {str(masked(violation.path, violation.value))[:60]})"
    said = violation.problem or f"{violation.expected}{value}"
    return f"{violation.path}: {said}{f'; {violation.fix}' if violation.fix else ''}"


def _look_around(draft: Draft, reading: Reading) -> None:
    """What the configuration refers to and isn't here; relative paths are those of the working directory."""
    assert reading.config is not None
    lines = [_line(violation) for violation in prerequisite_violations(reading.config)]
    draft.report.elsewhere += dict.fromkeys(lines)  # roles that share a model say the same of it
