"""The machines that a plan is for: kind and number of their devices, memory of the host."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from roll.configs.catalog.entries import nearest
from roll.configs.checks.dtype_choice import THIS_MACHINE, DtypeChoice, choose_dtype
from roll.configs.checks.machine_checks import Machine, this_machine


@dataclass(frozen=True)
class Device:
    """One kind of accelerator."""

    mib: int
    """Memory in MiB, as `nvidia-smi` or `rocm-smi` shows it; a little below the number in its name."""
    names: tuple[str, ...]
    """Parts of the name that the driver gives it, in lower case; all must be in it."""


DEVICES: dict[str, Device] = {
    "a10g": Device(23_028, ("a10g",)),
    "a100-40": Device(40_960, ("a100", "40gb")),
    "a100-80": Device(81_920, ("a100", "80gb")),
    "a800": Device(81_920, ("a800",)),
    "b200": Device(183_359, ("b200",)),
    "h20": Device(97_871, ("h20",)),
    "h100": Device(81_559, ("h100",)),
    "h200": Device(143_771, ("h200",)),
    "h800": Device(81_559, ("h800",)),
    "l4": Device(23_034, ("l4",)),
    "l40s": Device(46_068, ("l40s",)),
    "mi300x": Device(196_592, ("mi300x",)),
    "rtx3090": Device(24_576, ("rtx 3090",)),
    "rtx4090": Device(24_564, ("rtx 4090",)),
    "rtx5090": Device(32_607, ("rtx 5090",)),
    "rtxa6000": Device(49_140, ("rtx a6000",)),
    "t4": Device(15_360, ("t4",)),
    "v100-16": Device(16_384, ("v100", "16gb")),
    "v100-32": Device(32_768, ("v100", "32gb")),
}
"""By the name that users write."""


def named(driver_name: str) -> str | None:
    """Return which entry a driver's name means, e.g. `NVIDIA H100 80GB HBM3`; None for one that isn't in the table."""
    words = driver_name.lower()
    fitting = [
        name
        for name, device in DEVICES.items()
        if all(re.search(rf"(?<![a-z0-9]){re.escape(part)}(?![a-z0-9])", words) for part in device.names)
    ]
    return fitting[0] if fitting else None


MIB, GIB = 2**20, 2**30
_FORM = re.compile(r"^([a-z][\w.-]*?)(?::(\d+(?:\.\d+)?))?$")


@dataclass(frozen=True)
class Machines:
    """What every machine of a run has."""

    device: str | None
    """Kind of its accelerators; None: it has none, and roles share the host's memory."""
    count: int | None
    """Accelerators; None: as many as the configuration has slots."""
    device_bytes: int
    """Memory of each of them."""
    host_bytes: int | None
    """Memory of the host; None: unknown."""
    source: str = "--devices"
    """Who says so."""

    def __str__(self) -> str:
        parts = [f"{self.count or 1} x {self.device} ({self.device_bytes / GIB:.1f} GiB)"] if self.device else []
        parts += [f"{self.host_bytes / GIB:.1f} GiB of host memory"] if self.host_bytes else []
        return ", ".join(parts)


def parse_machines(text: str) -> Machines:
    """Return what `h100:8`, `h100:8,cpu:1024` or `cpu:64` says: devices per machine, and GiB of the host's memory.

    Raises:
        ValueError: an unknown device, a number that is none, or two kinds of accelerators.
    """
    device, count, host = None, None, None
    for part in filter(None, (part.strip().lower() for part in text.split(","))):
        match = _FORM.match(part)
        if match is None:
            raise ValueError(f"--devices: {part!r} isn't understood; write NAME:COUNT such as h100:8, or cpu:GIB")
        name, number = match.groups()
        if name == "cpu":
            if number is None or float(number) <= 0:
                raise ValueError("--devices: cpu needs its memory in GiB, such as cpu:64")
            host = int(float(number) * GIB)
            continue
        if name not in DEVICES:
            known = f"{nearest(name, DEVICES)}known: {', '.join(DEVICES)}, cpu:GIB"
            raise ValueError(f"--devices: there is no device {name!r} in the table; {known}")
        if device is not None:
            raise ValueError(f"--devices: {device} and {name}: the machines of a run have one kind of accelerator")
        if number is not None and not (number.isdigit() and 1 <= int(number) <= 1024):
            raise ValueError(f"--devices: {part!r}: the number of devices per machine is a whole one, from 1 to 1024")
        device, count = name, int(number) if number else None
    if device is None and host is None:
        raise ValueError("--devices: nothing is named; write e.g. h100:8, h100:8,cpu:1024 or cpu:64")
    return Machines(device, count, DEVICES[device].mib * MIB if device else 0, host)


def local_machines(accelerators: tuple[str, ...]) -> Machines:
    """Return what this machine has; `accelerators` are the names that its driver gives.

    Raises:
        ValueError: accelerators that aren't in the table.
    """
    if not accelerators:
        return Machines(None, None, 0, host_memory(), source=THIS_MACHINE)
    known = named(accelerators[0])
    if known is None:
        raise ValueError(
            f"this machine's {accelerators[0] or 'accelerator'} isn't in the table; say with --devices which it is "
            f"like: {', '.join(DEVICES)}"
        )
    return Machines(known, len(accelerators), DEVICES[known].mib * MIB, host_memory(), source=THIS_MACHINE)


def planned_dtype(machines: Machines) -> DtypeChoice:
    """Return what `dtype: auto` means on these machines; fp32 where nobody says what their processors have."""
    if machines.device is not None:
        return choose_dtype({machines.source: Machine(accelerators=(machines.device.upper(),))})
    if machines.source == THIS_MACHINE:
        return choose_dtype({THIS_MACHINE: this_machine()})
    return DtypeChoice("fp32", f"{machines.source} doesn't say what the processor has")


def host_memory() -> int:
    """Return bytes of memory of this machine, or of what its control group may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            limit = file.read().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total
