"""All that can be known about a configuration file before anything heavy is imported, in one error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from roll.configs.checks.folder_checks import beside
from roll.configs.checks.machine_checks import Machine
from roll.configs.checks.prerequisites import prerequisite_violations
from roll.configs.errors import ConfigError, Violation
from roll.configs.parsing.loader import ConfigReading, read_config
from roll.configs.schema.run_config import RunConfig
from roll.configs.stand_in import collect

Check = Callable[[RunConfig], Iterable[Violation]]


def load_checked(
    file: Path,
    overrides: Sequence[str] = (),
    *,
    extra: Sequence[Check] = (),
    last: Sequence[Check] = (),
    machine: Machine | None = None,
    tell: Callable[[str], None] | None = None,
) -> RunConfig:
    """Return the configuration in `file`; raise one `ConfigError` with everything that is wrong with it.

    That is its keys, the rules between them, what it refers to (files, models, functions), what `machine` (None: this
    one) can't do, and what `further` checks yield. A later stage is silent about keys that an earlier one has refused.
    `tell` is called with a note about each key that was taken as it is meant, though another system writes it so.
    """
    reading = read_config(file, overrides)
    for note in reading.notes if tell is not None else ():
        tell(note)  # type: ignore[misc]
    with beside(file.parent):
        config = checked(reading, str(file), extra=extra, machine=machine)
        if violations := collect(last, config):
            raise ConfigError(reading.key_lines.added_to(violations), str(file))
        return config


def checked(
    reading: ConfigReading, source: str = "", *, extra: Sequence[Check] = (), machine: Machine | None = None
) -> RunConfig:
    """Return the configuration of what has been read; raise as `load_checked` does."""
    violations = list(reading.violations)
    if reading.config is not None:
        sound = reading.sound and not violations
        stages = [
            lambda: prerequisite_violations(reading.config, machine, sound=sound),  # type: ignore[arg-type]
            lambda: collect(extra, reading.config, sound=sound),
        ]
        for stage in stages:
            reported = {violation.path for violation in violations}
            violations += [violation for violation in stage() if violation.path not in reported]
    if violations or reading.config is None:
        raise ConfigError(reading.key_lines.added_to(violations), source)
    return reading.config
