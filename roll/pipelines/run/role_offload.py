"""Offload the roles that share accelerators: before one works, the others give their memory back.

    generate   engine: weights + KV cache        trainers offloaded
    train      one trainer at a time             engine offloaded
    sync       actor_train, engine's weights     KV cache offloaded, so that two copies of the weights have room
    save       one trainer, engine's weights     the engine keeps what it was just sent

Without accelerators, or where no two roles share a slot, nothing is ever offloaded and every call here does nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping

from roll.distributed.cluster import Cluster
from roll.distributed.worker import Worker
from roll.pipelines.workers.infer_worker import InferWorker
from roll.pipelines.workers.train_worker import ForwardWorker
from roll.strategies.base import ENGINE_PARTS, STATE_PARTS

logger = logging.getLogger(__name__)

ENGINE = "actor_infer"
TRAINER = "actor_train"
_ALWAYS_LOADED = ("reward_model", "judge")  # Roles that work while responses are generated; they are never offloaded


class DeviceOffloader:
    """Knows which role's state is on the devices, and moves it.

    Args:
        colocated: pairs of roles that share a slot.
    """

    def __init__(self, colocated: Iterable[tuple[str, str]]) -> None:
        self._neighbours: dict[str, set[str]] = {}
        for one, other in colocated:
            if not (one.startswith(_ALWAYS_LOADED) or other.startswith(_ALWAYS_LOADED)):
                self._neighbours.setdefault(one, set()).add(other)
                self._neighbours.setdefault(other, set()).add(one)
        self._clusters: dict[str, Cluster] = {}
        self._offloaded: dict[str, set[str]] = {}
        self._engine_is_fresh = False
        """The engine has weights that it will still sample with; it keeps them, or they would have to be sent again."""
        self.offloaded_bytes: dict[str, int] = {}
        """Bytes that each role gave back when it was last offloaded, over all of its ranks."""

    def add(self, role: str, cluster: Cluster) -> None:
        """Register a role that has just been built, and offload it at once, so that its neighbours find room."""
        if role not in self._neighbours or not cluster.call(Worker.device)[0].startswith("cuda"):
            return
        self._clusters[role] = cluster
        self._offloaded[role] = set()
        self._offload(role, _parts(role))

    @property
    def offloaded(self) -> Mapping[str, set[str]]:
        """Return what of each role isn't on its devices."""
        return self._offloaded

    def onload(self, role: str) -> None:
        """Bring back all of a role that is about to work, after offloading those it shares devices with."""
        for other in sorted(self._neighbours.get(role, ())):
            keeps_weights = other == ENGINE and self._engine_is_fresh
            self._offload(other, ("kv_cache",) if keeps_weights else _parts(other))
        self._onload(role, _parts(role))

    def mark_engine_stale(self) -> None:
        """Note that nobody samples until the next sync: the engine needn't keep its weights."""
        self._engine_is_fresh = False

    @contextlib.contextmanager
    def while_syncing(self) -> Iterator[None]:
        """Have the weights of both ends of a sync on the devices, and nothing of any other role."""
        self.onload(TRAINER)
        for other in self._neighbours.get(ENGINE, set()) - {TRAINER}:
            self._offload(other, STATE_PARTS)
        self._onload(ENGINE, ("weights",))
        yield
        self._engine_is_fresh = True

    def _offload(self, role: str, parts: tuple[str, ...]) -> None:
        loaded = tuple(part for part in parts if part not in self._offloaded.get(role, parts))
        if not loaded:
            return
        method = InferWorker.sleep if role == ENGINE else ForwardWorker.sleep
        self.offloaded_bytes[role] = sum(self._clusters[role].call(method, loaded))
        self._offloaded[role] |= set(loaded)
        logger.debug("%s offloaded: %s, %.2f GiB", role, ", ".join(loaded), self.offloaded_bytes[role] / 2**30)

    def _onload(self, role: str, parts: tuple[str, ...]) -> None:
        wanted = tuple(part for part in parts if part in self._offloaded.get(role, ()))
        if wanted:
            self._clusters[role].call(InferWorker.wake if role == ENGINE else ForwardWorker.wake, wanted)
            self._offloaded[role] -= set(wanted)


def _parts(role: str) -> tuple[str, ...]:
    return ENGINE_PARTS if role == ENGINE else STATE_PARTS
