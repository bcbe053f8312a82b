"""The executors by name: the one place that knows them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from roll.distributed.cluster import Executor
from roll.distributed.placement import RolePlacement
from roll.utils.staging import sweep

EXECUTORS = ("inline", "ray")


def make_executor(
    name: str,
    placements: Sequence[RolePlacement],
    *,
    rpc_timeout: float,
    log_dir: Path | None = None,
    ray_address: str | None = None,
    ray_timeline: Path | None = None,
    ray_options: Mapping[str, int] | None = None,
    slots_per_machine: int | None = None,
) -> Executor:
    """Return the executor called `name` for these roles.

    `log_dir` receives one file per worker process (`<role>-<rank>.log`); None keeps them in a temporary folder.
    `ray_address` names a Ray cluster to join; None starts one on this machine, with `ray_options` of `ray.init`.
    `ray_timeline` is a file that receives Ray's own timeline at the end. `slots_per_machine` says which slots of a
    cluster that is joined share a machine; None: all do.
    """
    if name not in EXECUTORS:
        raise ValueError(f"unknown executor {name!r}; known: {list(EXECUTORS)}")
    sweep()
    if name == "inline":
        from roll.distributed.inline import InlineExecutor

        return InlineExecutor(placements, rpc_timeout=rpc_timeout)
    from roll.distributed.ray_executor import RayExecutor

    return RayExecutor(
        placements,
        rpc_timeout=rpc_timeout,
        log_dir=log_dir,
        address=ray_address,
        options=ray_options,
        timeline=ray_timeline,
        slots_per_machine=slots_per_machine,
    )
