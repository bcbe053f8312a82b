"""Counts operators as they reach the device: those that make the host wait for it, and any others by name."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

SYNCS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique_dim", "_unique2")
"""Operators whose result the host needs: each waits until the device has done all that it was given before."""


class OperatorCounts(TorchDispatchMode):
    """Inside, every operator is counted by its name without the namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket._qualified_op_name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))

    @property
    def syncs(self) -> dict[str, int]:
        """Those of the calls that make the host wait."""
        return {name: self.calls[name] for name in SYNCS if self.calls[name]}
