"""`roll migrate`: a file of ROLL, verl, TRL or OpenRLHF as a configuration of ours, with a report of every key."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from roll.cli.exits import Exit
from roll.utils.terminal import say
from roll.workbench.migrate.explain import as_json, as_text, explain
from roll.workbench.migrate.report import MigrationReport, as_yaml, write_file
from roll.workbench.migrate.translate import migrate as translated


def migrate(options: argparse.Namespace) -> int:
    """Write the configuration to NEW or to standard output, and the report beside it; or explain one key."""
    if options.explain is not None:
        return _explained(options)
    if options.old is None:
        raise ValueError("there is no file to migrate: roll migrate OLD, or roll migrate --explain KEY for one key")
    old: Path = options.old
    if not old.is_file():
        raise ValueError(f"there is no file {old}" if not old.exists() else f"{old} is a folder: name one file in it")
    for target in (options.output, options.report):
        if target is not None and target.resolve() == old.resolve():
            raise ValueError(f"{target} is the file to read: choose another name")
        if target is not None and target.exists() and not options.force:
            raise ValueError(f"{target} is there already: choose another name, or --force to replace it")
    report, tree = translated(old, options.system, look=True)
    text = "" if tree is None else as_yaml(report, tree)
    if options.output is not None and tree is not None:
        write_file(options.output, text, force=options.force)
    elif tree is not None and not options.json:
        sys.stdout.write(text)
    if options.report is not None:
        write_file(options.report, _as(report, options.report.suffix == ".json" or options.json), force=options.force)
    elif options.json:
        sys.stdout.write(report.json())
    elif options.output is not None or tree is None:
        sys.stdout.write(report.text())
    else:
        sys.stderr.write(f"\n{report.text()}")
    _close(report, options)
    return Exit.DONE


def _explained(options: argparse.Namespace) -> int:
    others = {"OLD": options.old, "-o": options.output, "--report": options.report, "--force": options.force or None}
    if idle := [name for name, value in others.items() if value is not None]:
        raise ValueError(
            f"--explain says something of one key and reads or writes no file: leave out {', '.join(idle)}"
        )
    answers = explain(options.explain, options.system)
    sys.stdout.write(as_json(answers) if options.json else as_text(answers))
    return Exit.DONE


def _as(report: MigrationReport, as_json: bool) -> str:
    return report.json() if as_json else report.text()


def _close(report: MigrationReport, options: argparse.Namespace) -> None:
    """Say in a line or two how it went."""
    say(report.summary())
    if report.missing:
        first = " ".join("; ".join(report.missing[:3]).split())[:300]
        say(f"before roll check passes, {len(report.missing)} more to write: {first}")
    if report.command:
        say(f"this job is a command here: {report.command}")
    elif options.output is not None:
        say(f"wrote {options.output}; next: roll check {options.output}")
