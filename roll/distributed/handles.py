"""Handles: big payloads that travel from worker to worker without passing through the controller.

Under `ray` a handle is a reference into the object store; in one process it is the object itself.
"""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

Handle: TypeAlias = Any
"""Opaque; pass it on, or `resolve` it."""


def crosses_processes() -> bool:
    """Return whether handles lead to other processes: what they hold is then copied on the way."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def put(payload: Any) -> Handle:
    """Return a handle to `payload`, which must not be changed afterwards."""
    return sys.modules["ray"].put(payload) if crosses_processes() else payload


def resolve(handle: Handle, *, timeout: float = 3600.0, maker: str = "the worker that made it") -> Any:
    """Return the payload behind a handle; waits at most `timeout` seconds for it to arrive from another machine.

    Raises `TimeoutError`, which names the `maker`.
    """
    ray = sys.modules.get("ray")
    if ray is None or not isinstance(handle, ray.ObjectRef):
        return handle
    try:
        return ray.get(handle, timeout=timeout)
    except ray.exceptions.GetTimeoutError as error:
        raise TimeoutError(
            f"object {handle.hex()} didn't arrive from {maker} within {timeout:g} s (rpc_timeout)"
        ) from error
