"""Memory of weights on their way from the trainer to the engines: what ranks gather, and the buckets of a transport."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from roll.configs.catalog.strategy_table import is_lockstep
from roll.configs.catalog.transport_table import Lane, lanes_between
from roll.configs.schema.deepspeed_config import DeepSpeedConfig
from roll.configs.schema.engine_config import EngineConfig
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.run_config import RunConfig
from roll.configs.schema.strategy_config import Fsdp2Config
from roll.workbench.planning.architecture import Architecture
from roll.workbench.planning.machines import MIB
from roll.workbench.planning.parameters import BYTES

ENGINE, TRAINER = "actor_infer", "actor_train"
GATHERED, GATHERED_ON_HOST = 256 * MIB, 32 * MIB
"""Whole tensors that one collective gathers, see `roll/strategies/hf/gather.py`; one tensor may be larger."""
BUCKET_ON_HOST = 16 * MIB
"""Largest bucket in memory of the host, see `roll/distributed/transports/bucket_layout.py`; likewise."""
SENT, RECEIVED = 2, 3
"""Buckets of a sender, and of a receiver of a broadcast, see `roll/distributed/transports/__init__.py`."""


def weight_sync(config: RunConfig, arch: Architecture, *, on_accelerator: bool) -> WeightSyncPlan | None:
    """Return the way of new weights of a model; None in runs without a trainer or engines."""
    if not isinstance(config, RLConfig) or not {ENGINE, TRAINER} <= config.placement.roles.keys():
        return None
    return WeightSyncPlan(config, arch, on_accelerator)


@dataclass(frozen=True)
class WeightSyncPlan:
    """The way of new weights in a run. Sizes are at most."""

    config: RLConfig
    arch: Architecture
    on_accelerator: bool

    def in_trainer(self, rank: int) -> int:
        """Return bytes that a trainer's rank needs where its weights are: full tensors, and buckets if it sends."""
        sends = rank == 0 if self._transport == "broadcast" else rank in self._sources
        return self._gathered + (SENT * self._bucket if sends else 0)

    def in_engine(self) -> int:
        """Return bytes that an engine needs where its weights are: what it receives, and a bucket for its processes."""
        received = RECEIVED * self._bucket if self._transport == "broadcast" else 0
        return received + (self._for_processes if self._opens_device else 0)

    def shared(self, engines: int, *, sends: bool) -> int:
        """Return bytes of shared host memory on a machine with so many engines; `sends`: and the trainer."""
        on_host = self._shares and not self._on_device
        # Processes of engines read the trainer's segments in place. Anything else is copied for them.
        copied = 0 if on_host or self._opens_device else engines * self._for_processes
        if not (on_host and sends):
            return copied
        # Of several senders the first alone has buffers for what is larger than a bucket.
        others = 0 if self.config.delta_weight_sync else len(self._lanes[0].senders) - 1
        smaller = min(self._bucket, self.config.model_update_buffer_size_mb * MIB)
        return copied + SENT * (self._bucket + others * smaller)

    # --- who carries them, and where --------------------------------------------------------------------------------

    @cached_property
    def _transport(self) -> str:
        """Return what `roll/pipelines/rl/sync_plan.py` chooses where `/dev/shm` is large enough."""
        config, plan = self.config, self.config.placement
        if config.weight_transport != "auto":
            return config.weight_transport
        if config.executor == "inline":
            return "in_process"
        nodes = {plan.node_of(slots[0]) for slots in (plan.roles[TRAINER][0], *plan.roles[ENGINE])}
        lockstep = is_lockstep(config.actor_infer.strategy_args.strategy_name)
        keeps = config.engine_restarts > 0 and not lockstep and config.async_generation_ratio > 0
        return "shared_memory" if len(nodes) == 1 and not keeps else "object_store"

    @property
    def _shares(self) -> bool:
        return self._transport == "shared_memory"

    @cached_property
    def _on_device(self) -> bool:
        """Return whether tensors reach an engine on its accelerator."""
        if not self.on_accelerator or (self.config.delta_weight_sync and self._transport != "in_process"):
            return False
        return self._transport in ("in_process", "broadcast") or bool(self._sources)

    @cached_property
    def _sources(self) -> tuple[int, ...]:
        """Return ranks of the trainer that send by CUDA handles."""
        if self.config.delta_weight_sync:
            return ()
        return tuple(rank for lane in self._lanes if lane.on_device for rank in lane.senders)

    @cached_property
    def _lanes(self) -> tuple[Lane, ...]:
        """Return who sends to whom, as `sync_plan.py` decides it where `/dev/shm` is large enough for all."""
        plan, options = self.config.placement, self.config.actor_train.strategy_args.strategy_config
        ranks = plan.roles[TRAINER]
        first = plan.node_of(ranks[0][0])
        near = {rank: slots for rank, slots in enumerate(ranks) if plan.node_of(slots[0]) == first}
        on_host = isinstance(options, Fsdp2Config) and options.offload_policy and len(ranks) > 1
        on_accelerator = self.on_accelerator and not on_host
        return lanes_between(self._transport, near, plan.roles[ENGINE], on_accelerator=on_accelerator)

    @property
    def _opens_device(self) -> bool:
        """Return whether an engine's processes read a bucket on the accelerator: they do, if the driver lets them."""
        return self._on_device and isinstance(self.config.actor_infer.strategy_args.strategy_config, EngineConfig)

    # --- sizes -------------------------------------------------------------------------------------------------------

    @property
    def _width(self) -> int:
        """Return bytes of a number: weights are cast before they travel."""
        return BYTES[self.config.actor_infer.model_args.dtype]

    @cached_property
    def _largest(self) -> int:
        """Return bytes of the largest tensor, which travels in one piece."""
        return max(weight.size for weight in self.arch.parameters()) * self._width

    @cached_property
    def _all(self) -> int:
        """Return bytes of all weights."""
        return self.arch.count() * self._width

    def _piece(self, most: int) -> int:
        """Return bytes of a buffer of `most`: no more than all weights, no less than the largest tensor."""
        return max(self._largest, min(most, self._all))

    @property
    def _bucket(self) -> int:
        size = self.config.model_update_buffer_size_mb * MIB
        return self._piece(size if self._on_device else min(size, BUCKET_ON_HOST))

    @property
    def _for_processes(self) -> int:
        served = isinstance(self.config.actor_infer.strategy_args.strategy_config, EngineConfig)
        return self._piece(self.config.model_update_buffer_size_mb * MIB) if served else 0

    @property
    def _gathered(self) -> int:
        worker = self.config.actor_train
        options, ranks = worker.strategy_args.strategy_config, worker.ranks
        batch = self._piece(GATHERED if self.on_accelerator else GATHERED_ON_HOST)
        if isinstance(options, Fsdp2Config) and ranks > 1:
            # Two batches, with this rank's part of each beside them, and the tensor that is cut out of one.
            return 2 * (batch + -(-batch // (options.fsdp_size or ranks))) + self._largest
        if isinstance(options, DeepSpeedConfig) and options.stage == 3 and worker.model_args.dtype != "fp32":
            return 2 * batch  # as it is gathered, and a copy
        return self._largest // self._width * 4 if ranks > 1 or self.on_accelerator else 0
