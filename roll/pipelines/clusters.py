"""Builds the clusters that a configuration asks for, and ends them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from roll.configs.batch import plan_batches
from roll.configs.rlvr import RLVRConfig
from roll.distributed.cluster import Cluster, Executor, RayOptions, make_executor
from roll.distributed.placement import RolePlacement
from roll.pipelines.residency import Residency
from roll.strategies import LOCKSTEP_ENGINES
from roll.workers.infer import InferWorker
from roll.workers.train import ForwardWorker, TrainWorker, train_spec

_ENGINE_CALLS = 8
"""Calls that an engine which computes on its own takes at once: requests and aborts arrive while a poll waits."""
_KINDS: dict[str, Literal["value", "reward"]] = {"critic": "value", "reward_model": "reward"}


@dataclass(frozen=True)
class Clusters:
    """The model roles of a run; what the configuration doesn't need isn't there."""

    actor_train: Cluster
    actor_infer: Cluster
    reference: Cluster | None
    critic: Cluster | None
    reward_model: Cluster | None
    residency: Residency = field(default_factory=lambda: Residency(()))
    """Whose memory is on the devices, where roles share them."""


def placements(config: RLVRConfig) -> list[RolePlacement]:
    """Where every rank of every started role runs, with the environment variables of its process."""
    plan = config.placement
    result = []
    for role, worker in config.roles.items():
        env = {**config.system_envs, **worker.system_envs}
        calls = _ENGINE_CALLS if role == "actor_infer" and not _computes_in_calls(config) else 1
        result.append(RolePlacement(role=role, ranks=plan.roles[role], env=env, max_concurrency=calls))
    return result


def _computes_in_calls(config: RLVRConfig) -> bool:
    return config.actor_infer.strategy_args.strategy_name in LOCKSTEP_ENGINES


def ray_options(config: RLVRConfig) -> RayOptions:
    """A run on one machine starts a Ray of its own; one on several joins the one that `ray start` spans over them."""
    return RayOptions(address="auto" if config.num_nodes > 1 else None)


@contextlib.contextmanager
def start_clusters(config: RLVRConfig, *, total_steps: int) -> Iterator[Clusters]:
    """Start every role; leaving the block ends all of them."""
    by_role = {placement.role: placement for placement in placements(config)}
    executor = make_executor(
        config.executor,
        list(by_role.values()),
        rpc_timeout=config.rpc_timeout,
        log_dir=config.logging_path / "workers",
        ray=ray_options(config),
    )
    with executor:
        residency = Residency(config.placement.colocated())
        started: dict[str, Cluster] = {}
        for role in ("actor_train", "actor_infer", "reference", "critic", "reward_model"):
            if role not in by_role:
                continue
            if role == "actor_infer":
                started[role] = executor.create_cluster(by_role[role], InferWorker, (config,))
            else:
                started[role] = _start(executor, by_role[role], config, total_steps)
            residency.add(role, started[role])
        yield Clusters(
            actor_train=started["actor_train"],
            actor_infer=started["actor_infer"],
            reference=started.get("reference"),
            critic=started.get("critic"),
            reward_model=started.get("reward_model"),
            residency=residency,
        )


def _start(executor: Executor, placement: RolePlacement, config: RLVRConfig, total_steps: int) -> Cluster:
    role = placement.role
    learns = role in ("actor_train", "critic")
    # The critic trains from the first step, the actor after the critic's warm-up.
    steps = total_steps - (config.critic_warmup if role == "actor_train" and config.uses_critic else 0)
    spec = train_spec(
        config,
        role,
        kind=_KINDS.get(role, "policy"),
        trains=learns and not config.val_only,
        total_optimizer_steps=max(1, steps) * plan_batches(config).of(role).optimizer_steps if learns else 1,
    )
    worker_cls = TrainWorker if learns else ForwardWorker
    return executor.create_cluster(placement, worker_cls, (config, spec), balance=config.balance_batch)


