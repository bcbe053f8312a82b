"""What `model_args.dtype: auto` means on which machines: a table of features, never a timing.

    accelerators                      bf16, or fp32 if one of them is older than bf16
    AMD with avx512_bf16, x86 with    bf16
    amx_bf16
    every other processor             fp32: products in bf16 take longer, on those with neither set several times as
                                      long; those of ARM weren't measured

`benchmarks/processor_types.py` measures a processor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from roll.configs.checks.machine_checks import BEFORE_BF16, Machine
from roll.configs.schema.key_values import changed
from roll.configs.schema.run_config import RunConfig

THIS_MACHINE = "this machine"
C = TypeVar("C", bound=RunConfig)


@dataclass(frozen=True)
class DtypeChoice:
    """A type, and why it was chosen."""

    dtype: Literal["fp32", "bf16"]
    reason: str


def choose_dtype(machines: Mapping[str, Machine]) -> DtypeChoice:
    """Return what all machines, by their names, compute in: one type, since roles on them share weights."""
    choices = {name: _choice(name, machine) for name, machine in machines.items()}
    lacking = [choice for choice in choices.values() if choice.dtype == "fp32"]
    return (lacking or list(choices.values()))[0]


def _choice(name: str, machine: Machine) -> DtypeChoice:
    old = [device for device in machine.accelerators if BEFORE_BF16.search(device)]
    if old:
        return DtypeChoice("fp32", f"{old[0]} of {name} has no bf16 arithmetic")
    if machine.accelerators or machine.amd:
        return DtypeChoice("bf16", f"the accelerators of {name} compute in it")
    instructions = machine.processor.multiplies_in_bf16()
    if instructions is not None:
        return DtypeChoice("bf16", f"the processor of {name} has {instructions}")
    return DtypeChoice("fp32", f"the processor of {name} {machine.processor.why_not_bf16()}")


def auto_roles(config: RunConfig) -> tuple[str, ...]:
    """Return the roles whose type is still to be chosen."""
    return tuple(role for role, worker in config.sections.items() if worker.model_args.dtype == "auto")


def with_dtypes(config: C, dtypes: Mapping[str, str]) -> C:
    """Return the configuration with these types, by role."""
    return changed(config, {f"{role}.model_args.dtype": dtype for role, dtype in dtypes.items()})


def sentence(dtype: str, roles: Sequence[str], reason: str) -> str:
    """Return the line that says what was chosen, for whom, and why."""
    return f"dtype: auto is {dtype} for {', '.join(roles)}: {reason}"
