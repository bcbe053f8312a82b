"""Roles of FSDP2 that shard weights across machines, where each machine could hold a copy of its own (HSDP)."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.schema.run_config import RunConfig
from roll.configs.schema.strategy_config import Fsdp2Config


def copies_within_machines(config: RunConfig) -> Iterator[tuple[str, int]]:
    """Yield (`<role>.strategy_args.strategy_config.fsdp_size`, ranks of a machine) for each such role.

    Consecutive ranks share a copy, so every machine must have as many of them, one after the other.
    """
    plan = config.placement
    for role, worker in config.roles.items():
        options, ranks = worker.strategy_args.strategy_config, plan.roles.get(role, ())
        if not isinstance(options, Fsdp2Config) or options.fsdp_size is not None:
            continue
        nodes = [plan.node_of(slots[0]) for slots in ranks]
        size = nodes.count(nodes[0]) if nodes else 0
        if 1 < size < len(nodes) and nodes == [node for node in nodes[::size] for _ in range(size)]:
            yield f"{role}.strategy_args.strategy_config.fsdp_size", size
