"""Clusters and executors: the only way the controller talks to workers.

The first rank that fails, dies or outlasts the time limit raises here at once, because its peers may be waiting for it
inside a collective and would never answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from roll.distributed.dispatch import Dispatch, check_layouts, merge_results, mode_of, split_batch
from roll.distributed.layout import RankLayout
from roll.distributed.placement import RolePlacement
from roll.distributed.worker import Worker

Method = Callable[..., Any]
START_TIMEOUT_S = 3600.0
"""Seconds that a role may take to stand: its processes, packages, models and engines. `rpc_timeout` bounds calls, and
may be short to notice one that hangs; a longer one counts here, too."""
PEERS_SHARE = 0.9
"""Share of `rpc_timeout` that ranks wait for each other: the one that waited reports it before its own call is late."""


class Cluster(ABC):
    """All ranks of one role."""

    def __init__(
        self,
        placement: RolePlacement,
        worker_cls: type[Worker],
        *,
        rpc_timeout: float,
        balance: bool,
        attention_share: float = 0.0,
        keep_groups: bool = False,
    ) -> None:
        self.placement = placement
        self.worker_cls = worker_cls
        self.rpc_timeout = rpc_timeout
        self._dealt: dict[str, Any] = {
            "balance": balance,
            "attention_share": attention_share,
            "keep_groups": keep_groups,
        }
        self._layouts: list[RankLayout] | None = None

    @property
    def role(self) -> str:
        """Name of the role."""
        return self.placement.role

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.placement.world_size

    @property
    def processes(self) -> list[tuple[str, int]]:
        """Host and process id of each rank. Default: nobody knows."""
        return []

    @property
    def dp_size(self) -> int:
        """Return the number of data-parallel ranks: the parts that a split call cuts its batch into. Asks the workers
        the first time."""
        return self._known_layouts(None)[0].dp_size

    def call(self, method: Method, *args: Any, timeout: float | None = None) -> Any:
        """Call a `@dispatch` method of the worker class; `timeout` in seconds, default: the cluster's `rpc_timeout`.

        Raises `WorkerTimeout`, `WorkerDied` or `WorkerFailed` (`WorkerRefused` where the worker raised a `ValueError`).
        """
        name = self._name_of(method)
        mode = mode_of(method)
        if mode is Dispatch.RANK_ZERO:
            return self._run(name, {0: args}, timeout)[0]
        if mode is Dispatch.ONE_TO_ALL:
            return self._run(name, dict.fromkeys(range(self.world_size), args), timeout)
        return self._split_call(name, args, timeout)

    def call_rank(self, rank: int, method: Method, *args: Any, timeout: float | None = None) -> Any:
        """Call the method on one rank, whatever its dispatch mode."""
        return self._run(self._name_of(method), {self._checked(rank): args}, timeout)[0]

    async def call_rank_async(self, rank: int, method: Method, *args: Any, timeout: float | None = None) -> Any:
        """Do `call_rank` on the event loop. Calls of one rank keep their order; cancelling doesn't stop the worker."""
        return await self._run_async(self._name_of(method), self._checked(rank), args, timeout)

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers; a second call does nothing."""

    @abstractmethod
    def _run(self, name: str, args: Mapping[int, tuple[Any, ...]], timeout: float | None) -> list[Any]:
        """Return results by the order of `args` (rank -> arguments); raises at the first rank that fails."""

    @abstractmethod
    async def _run_async(self, name: str, rank: int, args: tuple[Any, ...], timeout: float | None) -> Any: ...

    def _split_call(self, name: str, args: tuple[Any, ...], timeout: float | None) -> Any:
        from roll.types.ragged import Ragged

        if not args or not isinstance(args[0], Ragged):
            got = type(args[0]).__name__ if args else "nothing"
            raise TypeError(f"{self.role}.{name} splits its first argument over ranks: expected a Ragged, got {got}")
        layouts = self._known_layouts(timeout)
        batch, rest = args[0], args[1:]
        pieces = split_batch(batch, layouts, **self._dealt)
        # Ranks that share a piece share the tuple, so that an executor can ship it once.
        shipped = {id(piece): (piece, *rest) for piece in pieces}
        results = self._run(name, {rank: shipped[id(piece)] for rank, piece in enumerate(pieces)}, timeout)
        return merge_results(results, layouts, batch)

    def _known_layouts(self, timeout: float | None) -> list[RankLayout]:
        if self._layouts is None:
            layouts: list[RankLayout] = self._run("layout", dict.fromkeys(range(self.world_size), ()), timeout)
            check_layouts(self.role, layouts)
            self._layouts = layouts
        return self._layouts

    def _name_of(self, method: Method) -> str:
        name = method.__name__
        if not callable(getattr(self.worker_cls, name, None)):
            remote = sorted(
                n for n in dir(self.worker_cls) if hasattr(getattr(self.worker_cls, n), "__roll_dispatch__")
            )
            raise ValueError(f"{self.role} runs {self.worker_cls.__name__}, which has no {name!r}; it has {remote}")
        return name

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"{self.role} has ranks 0 to {self.world_size - 1}, got {rank}")
        return rank

    @property
    def peer_timeout(self) -> float:
        """Seconds that ranks of this role wait for each other."""
        return PEERS_SHARE * self.rpc_timeout

    @property
    def start_timeout(self) -> float:
        """Seconds that this role may take to stand."""
        return max(START_TIMEOUT_S, self.rpc_timeout)

    def _limit(self, timeout: float | None) -> float:
        return self.rpc_timeout if timeout is None else timeout


class Executor(ABC):
    """Starts clusters and owns what they share. A context manager: leaving it ends every worker."""

    def __init__(self, placements: Sequence[RolePlacement], *, rpc_timeout: float) -> None:
        self.placements = {placement.role: placement for placement in placements}
        self.rpc_timeout = rpc_timeout
        self._clusters: list[Cluster] = []

    def create_cluster(
        self,
        placement: RolePlacement,
        worker_cls: type[Worker],
        init_args: tuple[Any, ...] = (),
        *,
        rpc_timeout: float | None = None,
        balance: bool = True,
        attention_share: float = 0.0,
        keep_groups: bool = False,
    ) -> Cluster:
        """Build `worker_cls(info, *init_args)` on every rank and wait until all stand.

        `rpc_timeout` overrides the executor's; `balance`, `attention_share` and `keep_groups` say how rows are
        dealt out to data-parallel ranks in split calls, see `split_batch`.
        """
        if self.placements.get(placement.role) != placement:
            raise ValueError(f"{placement.role!r} isn't among the executor's placements {sorted(self.placements)}")
        dealt: dict[str, Any] = {"balance": balance, "attention_share": attention_share, "keep_groups": keep_groups}
        calls = {"rpc_timeout": rpc_timeout or self.rpc_timeout, **dealt}
        return self._start(placement, worker_cls, init_args, calls)

    def begin(self, roles: Collection[str]) -> None:
        """Start the processes of these roles at once, so that each stands when its cluster is built. Default: there are
        none to wait for."""

    @abstractmethod
    def _start(
        self, placement: RolePlacement, worker_cls: type[Worker], init_args: tuple[Any, ...], calls: Mapping[str, Any]
    ) -> Cluster:
        """Make a cluster and append it to `_clusters`, so that it is shut down; `calls` are keywords of `Cluster`."""

    def on_each_machine(
        self, function: Callable[..., Any], *args: Any, roles: Collection[str] | None = None
    ) -> dict[str, Any]:
        """Return what a module's function says on each machine whose slots are used, by the machine's address.

        `roles`: only machines with slots of these; None: all.
        """
        del roles
        return {"this machine": function(*args)}

    def shutdown(self) -> None:
        """End every cluster and what this executor started; a second call does nothing."""
        for cluster in self._clusters:
            cluster.shutdown()
        self._clusters.clear()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()
