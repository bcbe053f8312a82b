"""Memory of a step's rollouts on the host: most columns have some bytes a token, routed experts have hundreds."""

from __future__ import annotations

import math

from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.run_config import RunConfig
from roll.workbench.planning.architecture import Architecture
from roll.workbench.planning.items import Item, lasting, passing
from roll.workbench.planning.weight_sync import TRAINER

ROUTED = 2
"""Bytes of an expert's number, see `TokenBatch.routed_experts`."""


def routed_experts(config: RunConfig, arch: Architecture, working: str, phase: str) -> tuple[Item, ...]:
    """Return what `router_replay` takes on the controller's machine while a role is in a phase, for the longest rows.

    Turns of the step, and of those that generation is ahead, have it until the step is over. Its batch has it again,
    and so do the mini-batch, the parts for the ranks, and what is on its way to them and in their processes.
    """
    if not isinstance(config, RLConfig) or not config.router_replay or phase == "start":
        return ()
    step = config.batch.rows * config.max_sequence_length * arch.layers * arch.experts_per_token * ROUTED
    turns = lasting(("routed experts", step * (1 + math.ceil(config.async_generation_ratio))))
    if phase in ("generate", "sync"):
        return turns
    worker, copies = config.actor_train, 0.0
    if working == TRAINER:
        sent = int(worker.data_parallel > 1)
        sent += 0 if config.executor == "inline" else 1 + worker.ranks // worker.data_parallel
        share = config.batch.of(TRAINER).mini_batch / config.batch.rows
        copies = share * (1 + sent) if phase == "train" else sent
    return (*turns, *passing(("routed experts", step + int(step * copies))))
