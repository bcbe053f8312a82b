"""The base of every worker: plain Python objects that know where they stand, not who runs them."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from roll.distributed.dispatch import Dispatch, dispatch
from roll.distributed.layout import RankLayout
from roll.utils.staging import release

if TYPE_CHECKING:
    from roll.tracking.profiling.profile_plan import CallContext
    from roll.tracking.profiling.recorder import CallRecorder, RankRecord


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker is told about itself."""

    role: str
    rank: int
    world_size: int
    master_addr: str
    """Where rank 0 listens for its peers' process group."""
    master_port: int
    slots: tuple[int, ...]
    """Global device slots; empty for a worker that needs no device."""
    local_rank: int
    """Number of the worker's first device among those its process can see (what `LOCAL_RANK` means to torch)."""
    timeout: float = 3600.0
    """Seconds that ranks wait for each other: to meet, and in every collective. A little under `rpc_timeout`, so that
    the rank that waits says so before the controller gives up."""
    start_timeout: float | None = None
    """The same until the worker stands. None: `timeout`."""


@dataclass(frozen=True, slots=True)
class Ping:
    """A sign of life."""

    role: str
    rank: int
    node: str
    """The host name. Containers on different machines may have the same one."""
    pid: int
    machine: str = ""
    """Which machine: the same text for all processes that share it, and another for any other. Ray's id of its node,
    in one process the name of the machine."""


def machine_id() -> str:
    """Return what tells the machine of this process from others, see `Ping.machine`."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return str(ray.get_runtime_context().get_node_id())
    return socket.gethostname()


class Worker:
    """One rank of a role. Subclasses declare remote methods with `@dispatch`.

    Under `ray` an instance lives in a process of its own, under `inline` in the controller's. It is built and called by
    one thread at a time unless its placement allows more.
    """

    _recorder: CallRecorder | None = None

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info

    def invoke(self, name: str, args: tuple[Any, ...], context: CallContext | None = None) -> Any:
        """Call a method for a cluster. With a context the call is recorded, see roll/tracking/profiling."""
        if context is None or name == self.take_record.__name__:
            return getattr(self, name)(*args)
        if self._recorder is None:
            from roll.tracking.profiling.recorder import CallRecorder

            # Calls from several threads: the first one's recorder counts.
            self._recorder = vars(self).setdefault("_recorder", CallRecorder(self.info.role, self.info.rank))
        return self._recorder.call(name, partial(getattr(self, name), *args), context)

    @dispatch(Dispatch.ONE_TO_ALL)
    def take_record(self, start_ns: int) -> RankRecord | None:
        """Return what was recorded since the last call, None for nothing; a trace of operators is written now."""
        return self._recorder.take(start_ns) if self._recorder is not None else None

    @dispatch(Dispatch.ONE_TO_ALL)
    def ping(self) -> Ping:
        """Return who and where this worker is."""
        return Ping(self.info.role, self.info.rank, socket.gethostname(), os.getpid(), machine_id())

    @dispatch(Dispatch.ONE_TO_ALL)
    def free_shared_memory(self) -> int:
        """Return the bytes that are free in the shared memory of this worker's machine; 0 where there is none."""
        from roll.distributed.transports import shm_segments

        return shm_segments.free_bytes()

    @dispatch(Dispatch.ONE_TO_ALL)
    def device(self) -> str:
        """Return `cuda` where this process sees an accelerator, else `cpu`."""
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    @dispatch(Dispatch.ONE_TO_ALL)
    def layout(self) -> RankLayout:
        """Return this rank's place in the data-parallel split; asked once, before the first split call."""
        return RankLayout(dp_rank=self.info.rank, dp_size=self.info.world_size)

    @dispatch(Dispatch.ONE_TO_ALL)
    def drop_model_copies(self) -> None:
        """Let go of copies of models in shared memory (`use_shm`): they have been read."""
        release()

    def close(self) -> None:
        """Let go of what wouldn't end with the process, such as an engine's own processes. Default: nothing."""
