"""`roll doctor`: a table of what this machine has and what is wrong with it."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from functools import partial

from rich.table import Table

from roll.cli.exits import Exit
from roll.configs.checks.machine_checks import this_machine
from roll.isolation.sandbox.base import SandboxError, SandboxUnavailable
from roll.isolation.sandbox.open_sandbox import probe_sandbox
from roll.utils.console import Console
from roll.workbench.doctor import devices, machine, network, packages, pairs
from roll.workbench.doctor.findings import Finding, Probe, examine

_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "bold red"}


def doctor(options: argparse.Namespace) -> int:
    """Look at everything and print it as it comes; the exit code is 1 if there is a problem."""
    console = Console(highlight=False, markup=False, stderr=options.json)
    by_heading: dict[str, list[Finding]] = {}
    for heading, findings in examine(probes(options)):
        by_heading[heading] = findings
        console.print(heading, style="bold")
        table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
        table.add_column(no_wrap=True, min_width=8)
        table.add_column(no_wrap=True, min_width=16)
        table.add_column(overflow="fold")
        for each in findings:
            message = each.said + (f"\n-> {each.fix}" if each.fix and each.status != "ok" else "")
            table.add_row(
                f" {each.status}", each.subject, message, style="" if each.status == "ok" else _STYLES[each.status]
            )
        console.print(table)
    everything = [each for findings in by_heading.values() for each in findings]
    problems, warnings = (sum(each.status == status for each in everything) for status in ("problem", "warning"))
    verdict = "nothing is wrong" if not problems + warnings else f"problems: {problems}, warnings: {warnings}"
    console.print(f"{verdict}. Whether a configuration can run here: roll check FILE", style="bold")
    if options.json:
        json.dump(
            {heading: [asdict(each) for each in findings] for heading, findings in by_heading.items()}, sys.stdout
        )
        sys.stdout.write("\n")
    return Exit.FAILED if problems else Exit.DONE


def probes(options: argparse.Namespace) -> dict[str, Probe]:
    """Return what is looked at, in this order: the quick ones first."""
    return {
        "Python and packages": lambda: [*packages.python(), *packages.versions(), *pairs.pairs()],
        "This machine": lambda: [*machine.memory(), *machine.limits(), *machine.clock(options.output_dir)],
        "Disks": partial(machine.disks, options.output_dir),
        "Network": lambda: [*network.loopback(), *network.hub()],
        "Model output is contained": _sandbox,
        "Accelerators": lambda: devices.devices(this_machine()),
        "Imports": packages.imports,
        "Ray": network.ray,
    }


def _sandbox() -> list[Finding]:
    try:
        probe_sandbox("auto")
    except (SandboxUnavailable, SandboxError) as error:
        fix = "roll sandbox test; or a sandbox on another machine, see docs/sandbox.md"
        return [Finding("warning", "sandbox", f"none works, so rewards that run code are refused: {error}", fix)]
    return [Finding("ok", "sandbox", "one works; roll sandbox test attacks it")]
