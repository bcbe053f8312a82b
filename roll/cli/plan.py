"""`roll plan`: batch arithmetic, placement, and whether it all fits into memory. No model is loaded, no torch."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from roll.cli.exits import Exit
from roll.cli.measure import as_line, measured_step
from roll.configs.checks.machine_checks import Machine, this_machine
from roll.configs.errors import ConfigError, Violation
from roll.configs.full_check import checked
from roll.configs.parsing.find import find_config
from roll.configs.parsing.loader import MISSING_VALUE, read_config
from roll.configs.rules.layout_rules import shape_rules
from roll.configs.schema.key_values import changed
from roll.configs.schema.model_shape import read_shape
from roll.configs.schema.replicas import copies_within_machines
from roll.configs.schema.run_config import RunConfig
from roll.utils.terminal import say
from roll.workbench.planning.changes import Change, fill, make_fit, remedies, yaml_value
from roll.workbench.planning.machines import Machines, local_machines, parse_machines
from roll.workbench.planning.plan import MemoryPlan, plan_memory
from roll.workbench.planning.plan_report import as_json, as_text, gib


def plan(options: argparse.Namespace) -> int:
    """Print the plan; the exit code is 1 if the run doesn't fit."""
    file = find_config(options.file)
    config = read(file, options.overrides)
    machines = parse_machines(options.devices) if options.devices else local_machines(this_machine().accelerators)
    memory = plan_memory(config, machines)
    memory = replace(memory, notes=(*memory.notes, *_copies(config, machines)))
    accepted = _Checker(file, options.overrides, machines, config)
    fixes = [] if memory.fits or options.suggest else remedies(config, machines, accepted)
    proposal = suggest(config, machines, accepted) if options.suggest else None
    seconds = measure(file, options.overrides, options.measure_timeout) if options.measure else None
    if options.json:
        tree = as_json(memory, fixes)
        if options.suggest:
            tree["suggested"] = None if proposal is None else dict(proposal.keys)
        if seconds is not None:
            tree["measured_seconds"] = seconds
        json.dump(tree, sys.stdout)
        sys.stdout.write("\n")
    else:
        say_plan(config, memory, fixes, suggests=options.suggest)
        if options.suggest:
            sys.stdout.write(_suggestion(config, machines, proposal, memory) + "\n")
        if seconds is not None:
            sys.stdout.write(as_line(seconds) + "\n")
    return Exit.DONE if memory.fits else Exit.FAILED


def _copies(config: RunConfig, machines: Machines) -> Iterator[str]:
    """Yield a note for each role that could have a copy of its weights in each machine, and has room for it."""
    for key, size in copies_within_machines(config):
        if plan_memory(changed(config, {key: size}), machines).fits:
            role = key.partition(".strategy_args")[0]
            yield f"{role}: {key}={size} would fit, too, and weights would be gathered within machines only"


def measure(file: Path, overrides: Sequence[str], timeout: float) -> dict[str, float]:
    """Return the seconds of a step by phase, from a short run on this machine."""
    with tempfile.TemporaryDirectory(prefix="roll-plan-") as folder:
        config = read_config(file, _merged([*overrides, f"output_dir={folder}"]))
        return measured_step(checked(config), Path(folder), timeout=timeout)


def say_plan(config: RunConfig, memory: MemoryPlan, fixes: Sequence[Change], *, suggests: bool) -> None:
    """Print what `roll check` prints, and the memory."""
    text = as_text(memory, fixes)
    if suggests and not memory.fits:
        text = text.rpartition("\n")[0]  # the suggestion follows
    sys.stdout.write(f"{config.batch.explain()}\n{config.placement.explain()}\n{text}\n")


def read(file: Path, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration, checked as far as the machine that plans has no say; raise `ConfigError`.

    Values that are still to be given (`???`) are texts here, names of files mostly: memory doesn't depend on them.
    """
    reading = read_config(file, overrides)
    lacking = [violation.path for violation in reading.violations if violation.expected == MISSING_VALUE]
    if lacking and len(lacking) == len(reading.violations):
        reading = read_config(file, [*overrides, *(f"{path}=to_be_given" for path in lacking)])
    violations = list(reading.violations)
    if reading.config is not None and reading.sound and not violations:
        violations = shape_violations(reading.config)
    if violations or reading.config is None:
        raise ConfigError(reading.key_lines.added_to(violations), str(file))
    return reading.config


def shape_violations(config: RunConfig) -> list[Violation]:
    """Return parallel sizes that don't divide a model."""
    violations: list[Violation] = []
    for role, worker in config.roles.items():
        try:
            name = config.model_path(role)
        except ValueError:
            continue  # the rules have said so
        shape = read_shape(name, worker.model_args.model_config_kwargs)
        if shape is not None:
            violations += shape_rules(role, worker, name, shape)
    return violations


class _Checker:
    """Whether `roll check` on a machine with these devices finds nothing more to say with other keys."""

    def __init__(self, file: Path, overrides: Sequence[str], machines: Machines, config: RunConfig) -> None:
        self._file, self._overrides, self._config = file, list(overrides), config
        names = ("",) * (machines.count or config.num_gpus_per_node) if machines.device else ()
        self._machine = Machine(accelerators=names)
        self._before: set[str] | None = None

    def __call__(self, keys: Mapping[str, Any]) -> bool:
        if shape_violations(changed(self._config, keys)):
            return False
        if self._before is None:
            self._before = self._violation_paths({})
        return self._violation_paths(keys) <= self._before

    def _violation_paths(self, keys: Mapping[str, Any]) -> set[str]:
        overrides = [*self._overrides, *(f"{key}={yaml_value(value)}" for key, value in keys.items())]
        try:
            checked(read_config(self._file, _merged(overrides)), machine=self._machine)
        except ConfigError as error:
            return {violation.path for violation in error.violations}
        return set()


def _merged(overrides: Sequence[str]) -> list[str]:
    """Return the last value of each key."""
    return list({override.partition("=")[0]: override for override in overrides}.values())


def suggest(config: RunConfig, machines: Machines, accepted: _Checker) -> Change | None:
    """Return keys with which the run fits and uses what is free; None if there are none."""
    fitting = make_fit(config, machines, accepted)
    if fitting is None:
        return None
    larger = fill(changed(config, fitting.keys), machines, lambda keys: accepted({**fitting.keys, **keys}))
    return fitting + larger


def _suggestion(config: RunConfig, machines: Machines, proposal: Change | None, memory: MemoryPlan) -> str:
    if proposal is None:
        return "no suggestion: no values of these keys make it fit; it needs more or larger devices, or a smaller model"
    if not proposal.keys:
        return "no suggestion: larger micro-batches wouldn't fit"
    after = plan_memory(changed(config, proposal.keys), machines)
    before, now = memory.tightest, after.tightest
    say("every suggested value has passed roll check")
    lines = ["suggested, with the same mini-batches:" if memory.fits else "suggested, with which it fits:"]
    lines += [f"  {key}={yaml_value(value)}" for key, value in proposal.keys.items()]
    lines.append(f"  worst moment: {gib(before.worst.nbytes)} -> {gib(now.worst.nbytes)} of {gib(now.capacity or 0)}")
    return "\n".join(lines)
