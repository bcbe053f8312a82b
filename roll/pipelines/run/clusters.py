"""Builds the clusters that a configuration asks for, and ends them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.configs.catalog.strategy_table import STRATEGIES, is_lockstep
from roll.configs.checks.machine_checks import check_worker_machines, this_machine
from roll.configs.schema.deepspeed_config import DeepSpeedConfig
from roll.configs.schema.megatron_config import MegatronConfig
from roll.configs.schema.model_shape import read_shape
from roll.configs.schema.replicas import copies_within_machines
from roll.configs.schema.run_config import RunConfig
from roll.configs.schema.strategy_config import Fsdp2Config
from roll.distributed.cluster import Cluster, Executor
from roll.distributed.executors import make_executor
from roll.distributed.placement import RolePlacement
from roll.distributed.worker import Worker
from roll.pipelines.run.role_offload import DeviceOffloader
from roll.pipelines.workers.infer_worker import InferWorker
from roll.pipelines.workers.judge_engine import JudgeWorker
from roll.pipelines.workers.train_worker import ForwardWorker, TrainWorker, train_spec
from roll.tracking.profiling.profile_plan import ray_options

logger = logging.getLogger(__name__)

_ENGINE_CALLS = 8
"""Calls that an engine which computes on its own takes at once: requests and aborts arrive while a poll waits."""


@dataclass(frozen=True)
class Clusters:
    """The model roles of a run; what the configuration doesn't need isn't there."""

    by_role: Mapping[str, Cluster]
    offloader: DeviceOffloader = field(default_factory=lambda: DeviceOffloader(()))
    """Whose memory is on the devices, where roles share them."""

    @property
    def actor_train(self) -> Cluster:
        """Return the policy that learns."""
        return self.by_role["actor_train"]

    @property
    def actor_infer(self) -> Cluster:
        """Return its copies that generate, in pipelines with rollouts."""
        return self.by_role["actor_infer"]

    @property
    def reference(self) -> Cluster | None:
        """Return the frozen policy."""
        return self.by_role.get("reference")

    @property
    def teachers(self) -> dict[str, Cluster]:
        """Return the frozen models that teach the policy, by role."""
        return {
            role: cluster for role, cluster in self.by_role.items() if role.split(".")[0] in ("teacher", "teachers")
        }

    @property
    def critic(self) -> Cluster | None:
        """Return the value model."""
        return self.by_role.get("critic")

    @property
    def reward_models(self) -> dict[str, Cluster]:
        """Return the classifiers that score, by role."""
        return {role: cluster for role, cluster in self.by_role.items() if role.startswith("reward_model")}

    @property
    def judge(self) -> Cluster | None:
        """Return the language model that grades, where it is an engine of the run."""
        return self.by_role.get("judge")


def placements(config: RunConfig) -> list[RolePlacement]:
    """Return where every rank of every started role runs, with the environment variables of its process."""
    plan = config.placement
    result = []
    for role, worker in config.roles.items():
        env = {**config.system_envs, **worker.system_envs}
        name = worker.strategy_args.strategy_name
        # One of the user's own may not be made for calls from several threads at once.
        engine = role in ("actor_infer", "judge") and name in STRATEGIES and not is_lockstep(name)
        calls = _ENGINE_CALLS if engine else 1
        ranks = plan.roles[role]
        nsight = _under_nsight(config, role, len(ranks))
        result.append(RolePlacement(role=role, ranks=ranks, env=env, max_concurrency=calls, nsight=nsight))
    return result


def _under_nsight(config: RunConfig, role: str, ranks: int) -> dict[int, dict[str, str]]:
    """Return options of Nsight Systems for the ranks of a role whose processes Ray starts under it."""
    options = config.profiler
    if "nsight" not in options.tools or not config.profile_steps or (options.roles and role not in options.roles):
        return {}
    chosen = [rank for rank in range(ranks) if not options.ranks or rank in options.ranks]
    return {rank: ray_options(config.profiler_path, f"{role}-{rank}") for rank in chosen}


def ray_address(config: RunConfig) -> str | None:
    """Return where to join a Ray: a run on one machine starts its own; one on several joins that of `ray start`."""
    return "auto" if config.joins_ray else None


def open_executor(config: RunConfig, roles: Sequence[RolePlacement]) -> Executor:
    """Return the executor of a run, a context manager: what it has started ends with the block."""
    return make_executor(
        config.executor,
        roles,
        rpc_timeout=config.rpc_timeout,
        log_dir=config.logging_path / "workers",
        ray_address=ray_address(config),
        ray_options=config.ray_init.options,
        slots_per_machine=config.num_gpus_per_node,
        ray_timeline=config.profiler_path / "ray_timeline.json" if config.profiler.ray_timeline else None,
    )


@contextlib.contextmanager
def start_clusters(config: RunConfig, *, total_steps: int) -> Iterator[Clusters]:
    """Start every role; leaving the block ends all of them."""
    by_role = {placement.role: placement for placement in placements(config)}
    if keys := " ".join(f"{key}={size}" for key, size in copies_within_machines(config)):
        logger.info(
            "weights are gathered across machines for every layer of a pass: %s would keep a copy on each machine, and "
            "only sums of gradients would travel between them; roll plan says whether there is room",
            keys,
        )
    with open_executor(config, list(by_role.values())) as executor:
        if config.num_nodes > 1:
            # The machine of this process was looked at before, and may have neither accelerators nor their packages.
            check_worker_machines(config, executor.on_each_machine(this_machine))
            from roll.pipelines.run.shared_folders import check_shared_folders

            check_shared_folders(config, executor)
        offloader = DeviceOffloader(config.placement.colocated())
        started: dict[str, Cluster] = {}
        models = ("actor_train", "actor_infer", "reference", "teacher", "teachers", "critic")
        order = (*models, "reward_model", "reward_models", "judge")
        known = [role for role in by_role if role.split(".")[0] in order]
        executor.begin(known)
        for role in sorted(known, key=lambda role: order.index(role.split(".")[0])):
            if role == "actor_infer":
                started[role] = executor.create_cluster(by_role[role], InferWorker, (config,))
            elif role == "judge":
                started[role] = executor.create_cluster(by_role[role], JudgeWorker, (config,))
            else:
                started[role] = _start(executor, by_role[role], config, total_steps)
            offloader.add(role, started[role])
        if any(worker.model_args.use_shm for worker in config.roles.values()):
            for cluster in started.values():
                cluster.call(Worker.drop_model_copies)
        yield Clusters(started, offloader)


def _start(executor: Executor, placement: RolePlacement, config: RunConfig, total_steps: int) -> Cluster:
    role = placement.role
    learns = role in ("actor_train", "critic")
    # The critic trains from the first step, the actor after the critic's warm-up.
    steps = total_steps - (config.critic_warmup_steps if role == "actor_train" else 0)
    spec = train_spec(
        config,
        role,
        kind=config.kind_of(role),
        trains=learns and not config.only_validates,
        total_optimizer_steps=max(1, steps) * config.batch.of(role).optimizer_steps if learns else 1,
    )
    worker_cls = TrainWorker if learns else ForwardWorker
    shape = read_shape(config.model_path(role), spec.worker.model_args.model_config_kwargs)
    share = shape.attention_share if config.balance_by == "flops" and shape is not None else 0.0
    # Whether a rank really computes shared beginnings once only its model can tell; rows are dealt out as if it did.
    shares = spec.worker.use_prefix_sharing is not False
    trainable = Fsdp2Config | DeepSpeedConfig | MegatronConfig
    shares = shares and isinstance(spec.worker.strategy_args.strategy_config, trainable)
    dealt: dict[str, Any] = {"balance": config.balance_batch, "attention_share": share, "keep_groups": shares}
    return executor.create_cluster(placement, worker_cls, (config, spec), **dealt)
