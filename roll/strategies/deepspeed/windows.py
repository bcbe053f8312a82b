"""The gradients of one optimizer step, and the passes that they come from: begun anew, whatever became of the last.

DeepSpeed 0.19.8 cleans up after steps that are taken or skipped. Where an exception ends one (a loss of one's own,
memory that ran out), `engine.zero_grad` and the optimizer's leave parts of it: sums over micro-batches at stage 2,
which go into the next update, and how far the pass was.
"""

from __future__ import annotations

from typing import Any


def forget_gradients(engine: Any) -> None:
    """Start a ZeRO step without gradients, whatever became of the last one.

    DeepSpeed 0.19.8 keeps its float32 sums of an offloaded stage 2 when a step is skipped, and would add to its NaNs
    for ever after.
    """
    optimizer = engine.optimizer
    optimizer.zero_grad()
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        for group in optimizer.averaged_gradients:
            optimizer.averaged_gradients[group] = None


def finish_gathers(engine: Any) -> None:
    """Wait for weights of stage 3 that a pass has begun to gather ahead and not used.

    After a pass without gradients DeepSpeed 0.19.8 leaves them on their way until the next one begins, and fails
    where they are gathered for another purpose.
    """
    offload = None if engine is None else getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    if offload is not None and hasattr(offload, "get_param_coordinator"):
        offload.get_param_coordinator()._clean_inflight_param_registry()


def abandon(engine: Any) -> None:
    """Forget passes that an exception has ended; without collectives."""
    optimizer = engine.optimizer
    if not hasattr(optimizer, "optimizer"):  # stage 0: gradients are the parameters' own
        engine.zero_grad()
        return
    optimizer._backward_hook_state.reset_for_new_step()
    optimizer._backward_hook_state.backward_active_depth = 0
    optimizer._backward_hook_state.remaining_grad_acc_hooks = 0
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        _abandon_stage_1_or_2(optimizer)
    elif hasattr(optimizer, "fp16_partitioned_groups"):
        _abandon_stage_3(engine, optimizer)
    forget_gradients(engine)


def _abandon_stage_1_or_2(optimizer: Any) -> None:
    from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

    optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
    optimizer.ready_for_gradients = False
    optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
    optimizer.previous_reduced_grads.clear()
    for bucket in optimizer.ipg_buckets.values():
        bucket.clear()
    optimizer._release_ipg_buffers()
    optimizer._release_preflattened_grad_buffers()
    for group in optimizer.all_grad_tensors:
        optimizer.all_grad_tensors[group] = None
    if optimizer.cpu_offload:
        optimizer.reset_cpu_buffers()
        optimizer._offload_accumulated_param_ids = set()


def _abandon_stage_3(engine: Any, optimizer: Any) -> None:
    for bucket in optimizer.ipg_buckets.values():
        bucket.clear_params()
    for parameter in optimizer.params_already_reduced:
        optimizer.params_already_reduced[parameter] = False
    for parameter in engine.module.parameters():
        parameter.grad = None  # `zero_grad` asks for the stream of one, which a CPU hasn't
    for module in engine.module.modules():
        if hasattr(module._parameters, "_in_forward"):
            module._parameters._in_forward = False
    optimizer._partition_all_parameters()  # the next pass gathers those that stay
    # A weight without a gradient in the next window has that of the last one there.
    if optimizer.grad_partitions_flat_buffer is not None:
        optimizer.grad_partitions_flat_buffer.zero_()
    optimizer.averaged_gradients = {}
    if optimizer.offload_optimizer:
        optimizer.reset_cpu_buffers()
