"""From a role's configuration to the bytes that each of its ranks holds."""

from __future__ import annotations

from roll.configs.schema.deepspeed_config import DeepSpeedConfig
from roll.configs.schema.megatron_config import UNEVEN, MegatronConfig
from roll.configs.schema.strategy_config import Fsdp2Config
from roll.configs.schema.worker_config import TrainConfig, WorkerConfig
from roll.workbench.planning.architecture import Architecture, UnknownModel
from roll.workbench.planning.deepspeed_states import deepspeed_states
from roll.workbench.planning.fsdp2_states import fsdp2_states
from roll.workbench.planning.megatron_states import megatron_states
from roll.workbench.planning.parameters import role_parameters
from roll.workbench.planning.states import States


def states_of(
    arch: Architecture, worker: WorkerConfig, *, role: str, kind: str, trains: bool, rank: int, l2: bool = False
) -> States:
    """Return what one rank of a training backend holds.

    Args:
        arch: the role's model.
        worker: its section.
        role: its name, for messages.
        kind: `policy`, `value` or `reward`.
        trains: whether it has an optimizer.
        rank: which of its ranks.
        l2: whether its weights are pulled towards where they started.

    Raises:
        UnknownModel: the layout, or the adapters, are of a kind that can't be planned.
    """
    options, args = worker.strategy_args.strategy_config, worker.model_args
    common = {"ranks": worker.ranks, "rank": rank, "trains": trains, "dtype": args.dtype, "l2": l2}
    if isinstance(options, MegatronConfig):
        uneven = options.additional_configs.keys() & UNEVEN
        if uneven:
            key = f"{role}.strategy_args.strategy_config.additional_configs.{min(uneven)}"
            raise UnknownModel(f"{key}: stages of different sizes aren't planned; plan without it, for equal stages")
        if trains and args.uses_lora:
            key = f"{role}.model_args.lora_rank"
            raise UnknownModel(f"{key}: adapters on Megatron aren't planned; plan without them, for a bound")
        return megatron_states(arch, options, kind=kind, frozen=args.freeze_module_prefix, **common)  # type: ignore[arg-type]
    parameters = role_parameters(arch, args, kind, trains=trains, role=role)
    if isinstance(options, DeepSpeedConfig):
        return deepspeed_states(parameters, options, **common)  # type: ignore[arg-type]
    assert isinstance(options, Fsdp2Config), f"{role} is no role of a training backend"
    muon = isinstance(worker, TrainConfig) and worker.training_args.optimizer == "muon"
    return fsdp2_states(parameters, options, muon=muon, **common)  # type: ignore[arg-type]


def distinct_ranks(worker: WorkerConfig) -> list[int]:
    """Return ranks among which the one that holds most is: ends of data parallelism in every pipeline stage."""
    options, ranks = worker.strategy_args.strategy_config, worker.ranks
    stages = options.pipeline_model_parallel_size if isinstance(options, MegatronConfig) else 1
    each = max(1, ranks // stages)
    starts = [stage * each for stage in range(stages)]
    chosen = {start + offset for start in starts for offset in {0, 1, each // 2, each - 2, each - 1}}
    return sorted(rank for rank in chosen if 0 <= rank < ranks)
