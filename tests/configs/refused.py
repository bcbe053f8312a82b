"""What tables of broken configurations have in common."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from roll.configs.checks.prerequisites import check_prerequisites
from roll.configs.errors import ConfigError
from roll.configs.parsing.loader import load_config


def refusals(table: Sequence[tuple]) -> pytest.MarkDecorator:
    """Parametrise a test by rows of a name, overrides, and fragments of the one violation's text.

    Its path, which the test gets between them, is the key of the last override unless a fourth item gives another.
    """
    rows = [
        (name, overrides, *(path or [key_of(overrides[-1])]), fragments) for name, overrides, fragments, *path in table
    ]
    return pytest.mark.parametrize(
        ("overrides", "path", "fragments"), [row[1:] for row in rows], ids=[row[0] for row in rows]
    )


def key_of(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def check_refused(job, overrides, path, fragments) -> str:
    """Loading gives exactly one violation, at `path`, whose message has all fragments; return the message."""
    with pytest.raises(ConfigError) as caught:
        load_config(job, "job", list(overrides))
    return check_violation(caught.value, path, fragments)


def check_refused_here(job, overrides, path, fragments, machine=None) -> str:
    """Do the same for the files that it names, and for `machine` (None: this one)."""
    with pytest.raises(ConfigError) as caught:
        check_prerequisites(load_config(job, "job", list(overrides)), machine)
    return check_violation(caught.value, path, fragments)


def check_violation(error: ConfigError, path, fragments) -> str:
    assert [violation.path for violation in error.violations] == [path], str(error)
    for fragment in fragments:
        assert fragment in str(error)
    return str(error)
