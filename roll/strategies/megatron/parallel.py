"""Process groups of a Megatron role, and where this rank stands in them."""

from __future__ import annotations

from typing import Any

import torch

from roll.configs.schema.megatron_config import MegatronConfig
from roll.distributed.layout import RankLayout
from roll.distributed.process_group import connect as join_group
from roll.distributed.worker import WorkerInfo


def connect(info: WorkerInfo, options: MegatronConfig, *, backend: str, seed: int) -> RankLayout:
    """Join all groups of the layout. Ranks are numbered as Megatron does: tensor fastest, then context, data, pipeline.

    Roles of one process share its groups, which Megatron keeps as module state. Raises `ValueError` if the process
    already has another layout.
    """
    from megatron.core import parallel_state, tensor_parallel

    if parallel_state.is_initialized():
        _check_same(info, options)
    else:
        join_group(info, backend)
        parallel_state.initialize_model_parallel(
            **sizes(options),
            create_gloo_process_groups=False,  # for Megatron's own checkpoints of its optimizer, which aren't used
        )
        with torch.random.fork_rng(devices=[]):
            tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return RankLayout(
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        # The last pipeline stage has the results; it sends them to the first, so that rank 0 is one that collects.
        collects=parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
        and parallel_state.get_pipeline_model_parallel_rank() == 0,
    )


def stages(options: MegatronConfig) -> int | None:
    """Return virtual pipeline stages per rank; None for the plain schedule."""
    virtual = options.virtual_pipeline_model_parallel_size
    return None if virtual == 1 else virtual


def sizes(options: MegatronConfig) -> dict[str, Any]:
    """Return the parallel sizes, as Megatron calls them."""
    return {
        "tensor_model_parallel_size": options.tensor_model_parallel_size,
        "pipeline_model_parallel_size": options.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": stages(options),
        "context_parallel_size": options.context_parallel_size,
        "expert_model_parallel_size": options.expert_model_parallel_size,
        "expert_tensor_parallel_size": options.expert_tensor_parallel_size or options.tensor_model_parallel_size,
    }


def _check_same(info: WorkerInfo, options: MegatronConfig) -> None:
    from megatron.core import parallel_state

    wanted = {**sizes(options), "ranks": info.world_size}
    there = {name: getattr(parallel_state, f"get_{name.removesuffix('size')}world_size")() for name in sizes(options)}
    there["ranks"] = torch.distributed.get_world_size()
    if wanted != there:
        raise ValueError(
            f"{info.role}: another Megatron role of this process has the layout {there}, this one wants {wanted}; give "
            "both the same sizes, or use executor=ray, where each role has processes of its own"
        )


def send_from_last_stage(value: Any) -> Any:
    """Return what the last pipeline stage holds, on every stage. Metrics and the like: it is pickled."""
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    if torch.distributed.get_world_size(group) == 1:
        return value
    box = [value]
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    torch.distributed.broadcast_object_list(box, src=last, group=group)
    return box[0]


def broadcast_from_last_stage(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, filled on every stage with what the last one has in it."""
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    if torch.distributed.get_world_size(group) > 1:
        torch.distributed.broadcast(tensor, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return tensor
