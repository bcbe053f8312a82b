"""Accelerators that `roll plan --devices` knows, with the memory that their drivers report."""

from __future__ import annotations

import re
from dataclasses import dataclass


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
