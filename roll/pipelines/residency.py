"""Roles that share accelerators take turns on them: before one works, the others give their memory back.

    generate   engine: weights + KV cache        trainers asleep
    train      one trainer at a time             engine asleep
    sync       actor_train, engine's weights     KV cache asleep, so that two copies of the weights have room
    save       one trainer, engine's weights     the engine keeps what it was just sent

Without accelerators, or where no two roles share a slot, nothing ever sleeps and every call here does nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping

from roll.distributed.cluster import Cluster
from roll.distributed.worker import Worker
from roll.strategies.base import ENGINE_PARTS, STATE_PARTS
from roll.workers.infer import InferWorker
from roll.workers.train import ForwardWorker

logger = logging.getLogger(__name__)

ENGINE = "actor_infer"
TRAINER = "actor_train"
_AWAKE_TOGETHER = frozenset({"reward_model"})
"""Roles that work while responses are generated; they never sleep."""


class Residency:
    """Who is on the devices now.

    Args:
        colocated: pairs of roles that share a slot.
    """

    def __init__(self, colocated: Iterable[tuple[str, str]]) -> None:
        self._neighbours: dict[str, set[str]] = {}
        for one, other in colocated:
            if not {one, other} & _AWAKE_TOGETHER:
                self._neighbours.setdefault(one, set()).add(other)
                self._neighbours.setdefault(other, set()).add(one)
        self._clusters: dict[str, Cluster] = {}
        self._asleep: dict[str, set[str]] = {}
        self._engine_is_fresh = False
        """The engine has weights that it will still sample with; it keeps them, or they would have to be sent again."""
        self.freed: dict[str, int] = {}
        """Bytes that each role gave back when it last fell asleep, over all of its ranks."""

    def add(self, role: str, cluster: Cluster) -> None:
        """A role that has just been built. It sleeps at once, so that its neighbours find room for theirs."""
        if role not in self._neighbours or not cluster.call(Worker.device)[0].startswith("cuda"):
            return
        self._clusters[role] = cluster
        self._asleep[role] = set()
        self._sleep(role, ENGINE_PARTS if role == ENGINE else STATE_PARTS)

    @property
    def asleep(self) -> Mapping[str, set[str]]:
        """What of each role isn't on its devices."""
        return self._asleep

    def use(self, role: str) -> None:
        """This trainer, critic or reference is about to work."""
        self._clear_for(role)
        self._wake(role, STATE_PARTS)

    def generating(self) -> None:
        """The engines are about to sample, with the weights that they were sent last."""
        self._clear_for(ENGINE)
        self._wake(ENGINE, ENGINE_PARTS)

    def generated(self) -> None:
        """Nobody samples until the next sync."""
        self._engine_is_fresh = False

    @contextlib.contextmanager
    def syncing(self) -> Iterator[None]:
        """Around a sync: both ends have their weights, nobody else has anything."""
        self.use(TRAINER)
        for other in self._neighbours.get(ENGINE, set()) - {TRAINER}:
            self._sleep(other, STATE_PARTS)
        self._wake(ENGINE, ("weights",))
        yield
        self._engine_is_fresh = True

    def _clear_for(self, role: str) -> None:
        for other in sorted(self._neighbours.get(role, ())):
            if other == ENGINE:
                self._sleep(ENGINE, ("kv_cache",) if self._engine_is_fresh else ENGINE_PARTS)
            else:
                self._sleep(other, STATE_PARTS)

    def _sleep(self, role: str, parts: Iterable[str]) -> None:
        cluster = self._clusters.get(role)
        missing = [] if cluster is None else [part for part in parts if part not in self._asleep[role]]
        if cluster is None or not missing:
            return
        method = InferWorker.sleep if role == ENGINE else ForwardWorker.sleep
        self.freed[role] = sum(cluster.call(method, tuple(missing)))
        self._asleep[role] |= set(missing)
        logger.debug("%s sleeps: %s, %.2f GiB", role, ", ".join(missing), self.freed[role] / 2**30)

    def _wake(self, role: str, parts: Iterable[str]) -> None:
        cluster = self._clusters.get(role)
        wanted = [] if cluster is None else [part for part in parts if part in self._asleep[role]]
        if cluster is None or not wanted:
            return
        cluster.call(InferWorker.wake if role == ENGINE else ForwardWorker.wake, tuple(wanted))
        self._asleep[role] -= set(wanted)

