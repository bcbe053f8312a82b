"""The plan of a run: what every device and every host holds in the worst moment of each phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from roll.configs.catalog.strategy_table import STRATEGIES
from roll.configs.checks.dtype_choice import auto_roles, sentence, with_dtypes
from roll.configs.schema.engine_config import EndpointConfig, EngineConfig
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.run_config import RunConfig
from roll.configs.schema.strategy_config import HfInferConfig
from roll.configs.schema.worker_config import ForwardConfig
from roll.workbench.planning.architecture import Architecture, UnknownModel, read_architecture
from roll.workbench.planning.engines import EngineRole, engine_memory
from roll.workbench.planning.items import Item, RoleMemory
from roll.workbench.planning.machines import Machines, planned_dtype
from roll.workbench.planning.parameters import BYTES
from roll.workbench.planning.role_states import distinct_ranks
from roll.workbench.planning.rollouts import routed_experts
from roll.workbench.planning.training import TrainedRole, training_memory
from roll.workbench.planning.weight_sync import ENGINE, TRAINER, weight_sync

CONTROLLER = "controller"
"""The process of the pipeline, on the first machine."""
_ALWAYS_AWAKE = ("reward_model", "judge")
"""Roles that work while responses are generated: they never give their memory to others."""
Counts: TypeAlias = dict[str, dict[int, tuple[RoleMemory, int]]]
"""Role -> what some of its ranks on a machine hold, by identity, with their number."""
RESERVE = 0.03
"""Share of a device that fragments of freed memory take."""


@dataclass(frozen=True)
class MemoryUse:
    """The memory that is used at one location in the worst moment of a phase."""

    phase: str
    role: str
    """Who works."""
    items: tuple[tuple[str, Item], ...]
    """(role, what it holds)"""

    @property
    def lasting(self) -> int:
        """Return bytes that are there throughout."""
        return sum(item.nbytes for _, item in self.items if item.lasting)

    @property
    def nbytes(self) -> int:
        """Return bytes in the worst moment."""
        return sum(item.nbytes for _, item in self.items)


@dataclass(frozen=True)
class MemoryLocation:
    """A device, or the memory of a machine."""

    name: str
    capacity: int | None
    """Bytes; None: unknown."""
    uses: tuple[MemoryUse, ...]
    slots: tuple[int, ...] = ()
    """Of devices: all that hold the same."""

    @property
    def worst(self) -> MemoryUse:
        """Return the fullest phase."""
        return max(self.uses, key=lambda use: use.nbytes)

    @property
    def missing(self) -> int:
        """Return bytes by which it is too small; 0: it is large enough."""
        return 0 if self.capacity is None else max(0, self.worst.nbytes - self.capacity)

    def worst_of(self, phases: tuple[str, ...]) -> MemoryUse | None:
        """Return the fullest of some phases."""
        return max((use for use in self.uses if use.phase in phases), key=lambda use: use.nbytes, default=None)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What `plan_memory` found."""

    machines: Machines
    models: Mapping[str, Architecture]
    """By role."""
    devices: tuple[MemoryLocation, ...]
    """Those that differ: each stands for all that hold the same."""
    hosts: tuple[MemoryLocation, ...]
    shared: int
    """Bytes of a machine's memory that processes share during a sync."""
    too_small: Mapping[str, int]
    """Role -> bytes of the share that its engine was given, which isn't enough for one response."""
    notes: tuple[str, ...]

    @property
    def missing(self) -> int:
        """Return bytes that the fullest device, or host, lacks."""
        return max(memory.missing for memory in (*self.devices, *self.hosts))

    @property
    def fits(self) -> bool:
        """Return whether everything has room."""
        return not self.missing and not self.too_small

    @property
    def tightest(self) -> MemoryLocation:
        """Return the place that lacks most, or has least left."""
        sized = [memory for memory in (*self.devices, *self.hosts) if memory.capacity]
        return max(sized or [*self.devices, *self.hosts], key=lambda p: p.worst.nbytes / (p.capacity or 1))


def plan_memory(config: RunConfig, machines: Machines) -> MemoryPlan:
    """Return the plan.

    Raises:
        UnknownModel: a model without config.json, or of a family or layout that isn't known.
        ValueError: fewer devices than the configuration's slots.
    """
    roles = auto_roles(config)
    if not roles:
        return _Planner(config, machines).plan()
    choice = planned_dtype(machines)
    plan = _Planner(with_dtypes(config, dict.fromkeys(roles, choice.dtype)), machines).plan()
    return replace(plan, notes=(sentence(choice.dtype, roles, choice.reason), *plan.notes))


class _Planner:
    def __init__(self, config: RunConfig, machines: Machines) -> None:
        self._config, self._machines = config, machines
        self._on_accelerator = machines.device is not None
        slots = config.num_gpus_per_node
        if self._on_accelerator and machines.count is not None and machines.count < slots:
            raise ValueError(
                f"num_gpus_per_node: the configuration has {slots} device slots per machine, {machines.source} has "
                f"{machines.count} x {machines.device}; write num_gpus_per_node={machines.count} and smaller "
                "device_mappings, or plan for other machines"
            )
        # A model behind a service takes nothing here.
        self._workers = {
            role: worker
            for role, worker in config.roles.items()
            if not isinstance(worker.strategy_args.strategy_config, EndpointConfig)
        }
        ranks = {role: slots for role, slots in config.placement.roles.items() if role in self._workers}
        self._placement = replace(config.placement, roles=ranks)
        self._notes: list[str] = []
        self._memories: dict[tuple[str, int], RoleMemory] = {}
        for role in self._workers:
            self._check_planned(role)

    def _check_planned(self, role: str) -> None:
        name = self._workers[role].strategy_args.strategy_name
        if name not in STRATEGIES:
            key = f"{role}.strategy_args.strategy_name"
            raise UnknownModel(f"{key}: {name} is a backend of your own, whose memory isn't known; plan a built-in one")

    @cached_property
    def _models(self) -> dict[str, Architecture]:
        config, models = self._config, {}
        for role, worker in self._workers.items():
            own = worker.model_args.model_name_or_path
            key = f"{role}.model_args.model_name_or_path" if own else "pretrain"
            models[role] = read_architecture(config.model_path(role), worker.model_args.model_config_kwargs, key)
            if models[role].tower:
                path = config.model_path(role)
                self._notes.append(f"{path}: its tower for pictures isn't counted; the language model is loaded alone")
        return models

    def _memory(self, role: str, rank: int) -> RoleMemory:
        """Return the memory of one rank; ranks that hold the same share an answer."""
        worker = self._workers[role]
        options = worker.strategy_args.strategy_config
        engine = isinstance(options, EngineConfig | HfInferConfig)
        alike = 0 if engine else _like(rank, distinct_ranks(worker))
        key = (role, alike)
        if key not in self._memories:
            made = self._of_engine(role) if engine else self._of_trainer(role, alike)
            # One object for all that hold the same.
            self._memories[key] = next((known for known in self._memories.values() if known == made), made)
        return self._memories[key]

    def _of_engine(self, role: str) -> RoleMemory:
        return engine_memory(
            EngineRole(
                config=self._config,
                role=role,
                worker=self._workers[role],
                arch=self._models[role],
                on_accelerator=self._on_accelerator,
                device_bytes=self._machines.device_bytes,
            )
        )

    def _of_trainer(self, role: str, rank: int) -> RoleMemory:
        worker = self._workers[role]
        assert isinstance(worker, ForwardConfig)
        return training_memory(
            TrainedRole(
                config=self._config,
                role=role,
                worker=worker,
                arch=self._models[role],
                rank=rank,
                on_accelerator=self._on_accelerator,
            )
        )

    # --- who is where ----------------------------------------------------------------------------------------------

    def _ranks_on(self, slot: int) -> list[tuple[str, int]]:
        return [
            (role, rank)
            for role, ranks in self._placement.roles.items()
            for rank, slots in enumerate(ranks)
            if slot in slots
        ]

    def _sleeps(self, role: str, while_working: str) -> bool:
        """Return whether a role has freed memory while another works, as `pipelines/run/role_offload.py` decides."""
        if not self._on_accelerator or role == while_working:
            return False
        if role.startswith(_ALWAYS_AWAKE) or while_working.startswith(_ALWAYS_AWAKE):
            return False
        return tuple(sorted((role, while_working))) in {tuple(sorted(pair)) for pair in self._placement.colocated()}

    def plan(self) -> MemoryPlan:
        """Put together the places of all machines."""
        slots = sorted({slot for ranks in self._placement.roles.values() for rank in ranks for slot in rank})
        devices: dict[tuple[tuple[str, int], ...], MemoryLocation] = {}
        if self._on_accelerator:
            for slot in slots:
                held = tuple((role, id(self._memory(role, rank))) for role, rank in self._ranks_on(slot))
                if held not in devices:
                    devices[held] = self._device(slot)
        nodes = sorted({self._placement.node_of(slot) for slot in slots})
        hosts = [self._host(node) for node in nodes]
        fullest = max(hosts, key=lambda host: host.worst.nbytes)
        too_small = {m.role: m.limit for m in self._memories.values() if m.limit is not None}
        notes = [f"{m.role}: {note}" for m in self._memories.values() for note in m.notes]
        return MemoryPlan(
            machines=self._machines,
            models=self._models,
            devices=tuple(devices.values()),
            hosts=(fullest,),
            shared=max(self._shared(node) for node in nodes),
            too_small=too_small,
            notes=tuple(dict.fromkeys((*notes, *self._notes))),
        )

    def _device(self, slot: int) -> MemoryLocation:
        here = self._ranks_on(slot)
        memories = {role: self._memory(role, rank) for role, rank in here}
        uses = [
            MemoryUse(phase, role, tuple(self._held(memories, role, phase)))
            for role, memory in memories.items()
            for phase in memory.phases
        ]
        capacity = int(self._machines.device_bytes * (1 - RESERVE))
        same = self._slots_like(here)
        return MemoryLocation(device_name(same), capacity, tuple(uses), tuple(same))

    def _slots_like(self, here: list[tuple[str, int]]) -> list[int]:
        wanted = [(role, id(self._memory(role, rank))) for role, rank in here]
        slots = sorted({slot for ranks in self._placement.roles.values() for rank in ranks for slot in rank})
        return [
            slot
            for slot in slots
            if [(role, id(self._memory(role, rank))) for role, rank in self._ranks_on(slot)] == wanted
        ]

    def _held(self, memories: Mapping[str, RoleMemory], working: str, phase: str) -> Iterator[tuple[str, Item]]:
        """Yield who holds what while `working` is in a phase."""
        for role, memory in memories.items():
            asleep = self._sleeps(role, working)
            if phase == "sync" and {role, working} <= {ENGINE, TRAINER}:
                # The weights of both ends are there; where they share devices, the KV cache isn't.
                without = {"KV cache"} if self._sleeps(ENGINE, TRAINER) else set()
                yield from ((role, item) for item in memory.awake if item.what not in without)
            elif phase == "start" and role == working:
                yield from ((role, item) for item in memory.awake if item.what == "process")
            elif phase == "start" and self._built_later(role, working):
                continue
            else:
                yield from ((role, item) for item in (memory.asleep if asleep else memory.awake))
        for role in _at_work(working, phase):
            if role in memories:
                yield from ((role, item) for item in memories[role].phases.get(phase, ()))

    def _built_later(self, role: str, than: str) -> bool:
        order = [
            TRAINER,
            ENGINE,
            "reference",
            "teacher",
            "teachers",
            "critic",
            "reward_model",
            "reward_models",
            "judge",
        ]
        return order.index(role.split(".")[0]) > order.index(than.split(".")[0])

    # --- machines --------------------------------------------------------------------------------------------------

    def _host(self, node: int) -> MemoryLocation:
        """Return the memory of a machine: processes, and what is offloaded; without accelerators all there is."""
        counts: Counts = defaultdict(dict)
        for role, ranks in self._placement.roles.items():
            for rank, slots in enumerate(ranks):
                if self._placement.node_of(slots[0]) == node:
                    memory = self._memory(role, rank)
                    count = counts[role].get(id(memory), (memory, 0))[1]
                    counts[role][id(memory)] = (memory, count + 1)
        uses = [
            MemoryUse(phase, working, tuple(self._in_phase(counts, node, working, phase)))
            for working, mine in counts.items()
            for phase in {phase for memory, _ in mine.values() for phase in (*memory.phases, *memory.host_phases)}
        ]
        if not self._on_accelerator and self._config.executor == "inline":
            uses = [MemoryUse(use.phase, use.role, tuple(_one_process(use.items))) for use in uses]
        return MemoryLocation(
            f"host {node}" if self._config.num_nodes > 1 else "host", self._machines.host_bytes, tuple(uses)
        )

    def _in_phase(self, counts: Counts, node: int, working: str, phase: str) -> Iterator[tuple[str, Item]]:
        """Yield what a machine with these ranks holds while `working` is in a phase."""
        for role, others in counts.items():
            if phase == "start" and role != working and self._built_later(role, working):
                continue
            building = phase == "start" and role == working
            for memory, count in others.values():
                yield from self._on_host(memory, count, asleep=self._sleeps(role, working), building=building)
        for role in _at_work(working, phase):
            for memory, count in counts.get(role, {}).values():
                yield from self._passing_on_host(memory, count, phase)
        yield from self._copies(node, phase)
        if node == 0 and ENGINE in self._models:
            routed = routed_experts(self._config, self._models[ENGINE], working, phase)
            yield from ((CONTROLLER, item) for item in routed)
        if phase == "sync" and (shared := self._shared(node)):
            yield working, Item("sync buffers", shared, lasting=False)

    def _on_host(self, memory: RoleMemory, count: int, *, asleep: bool, building: bool) -> list[tuple[str, Item]]:
        if self._on_accelerator:
            size = memory.host_asleep if asleep else memory.host_awake
            size = 0 if building else size
            return [(memory.role, Item("offloaded, and processes", size * count))] if size else []
        awake = [item for item in memory.awake if not building or item.what == "process"]
        items = [(memory.role, Item(item.what, item.nbytes * count)) for item in awake]
        if memory.host_awake and not building:
            items.append((memory.role, Item("offloaded, and processes", memory.host_awake * count)))
        return items

    def _passing_on_host(self, memory: RoleMemory, count: int, phase: str) -> list[tuple[str, Item]]:
        sizes = [("activations", memory.host_phases.get(phase, 0))]
        if self._on_accelerator:
            sizes.append(("weights", memory.host_start if phase == "start" else 0))
        else:
            sizes += [(item.what, item.nbytes) for item in memory.phases.get(phase, ())]
        return [(memory.role, Item(what, size * count, lasting=False)) for what, size in sizes if size]

    def _shared(self, node: int) -> int:
        """Return buckets of weights on their way, in memory of the host that processes share."""
        sync = None
        if ENGINE in self._models:
            sync = weight_sync(self._config, self._models[ENGINE], on_accelerator=self._on_accelerator)
        if sync is None:
            return 0
        ranks, node_of = self._placement.roles, self._placement.node_of
        engines = sum(node_of(slots[0]) == node for slots in ranks[ENGINE])
        return sync.shared(engines, sends=node_of(ranks[TRAINER][0][0]) == node)

    def _copies(self, node: int, phase: str) -> list[tuple[str, Item]]:
        """Return the copies of `delta_weight_sync`, in the engines' type: of trainer rank 0 and of each engine."""
        config, ranks = self._config, self._placement.roles
        delta = isinstance(config, RLConfig) and config.delta_weight_sync and {ENGINE, TRAINER} <= ranks.keys()
        if not delta or phase == "start":
            return []
        holders = [ranks[TRAINER][0][0], *(slots[0] for slots in ranks[ENGINE])]
        here = sum(self._placement.node_of(slot) == node for slot in holders)
        size = here * self._models[ENGINE].count() * BYTES[self._workers[ENGINE].model_args.dtype]
        return [(ENGINE, Item("weight copies", size))]


def _at_work(working: str, phase: str) -> tuple[str, ...]:
    """Return roles that are in a phase at once: weights leave the trainer while the engine takes them."""
    return (TRAINER, ENGINE) if phase == "sync" else (working,)


def _one_process(items: tuple[tuple[str, Item], ...]) -> Iterator[tuple[str, Item]]:
    """Yield one process for `inline`, with the libraries of all roles."""
    has_accelerator = False
    for role, item in items:
        if item.what != "process":
            yield role, item
        elif not has_accelerator:
            has_accelerator = True
            yield role, item


def _like(rank: int, chosen: list[int]) -> int:
    """Return the rank that stands for `rank`: the nearest one that isn't larger."""
    return max(other for other in chosen if other <= rank)


def device_name(slots: Sequence[int]) -> str:
    """Return `device 3`, or `devices 0-7,12`."""
    return f"device{'s' * (len(slots) > 1)} {_spans(sorted(slots))}"


def _spans(slots: Sequence[int]) -> str:
    """Return indices as spans, such as `0-7,12`."""
    spans: list[list[int]] = []
    for slot in slots:
        if spans and slot == spans[-1][-1] + 1:
            spans[-1].append(slot)
        else:
            spans.append([slot])
    return ",".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
