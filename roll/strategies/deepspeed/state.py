"""Float32 weights and moments of AdamW, wherever ZeRO keeps them: whole ones in and out, and this rank's part.

The functions take parameters of the module that the engine wraps. Whole tensors are collectives: every rank calls them
for the same parameters in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from roll.distributed.byte_account import count_gathered
from roll.strategies.base import StatePart
from roll.strategies.hf.gather import Travelling, limit
from roll.strategies.training.optim import MOMENTS


def full_tensor(engine: Any, parameter: Any, moment: str | None = None) -> Tensor:
    """Return the float32 weight of a trained parameter, a frozen one as it is, or a moment by its name."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    full: Tensor
    if parameter.requires_grad and _sharded(engine):
        full = safe_get_full_optimizer_state(parameter, moment) if moment else safe_get_full_fp32_param(parameter)
    elif moment:
        full = engine.optimizer.state[parameter][moment]
    elif hasattr(parameter, "ds_id"):
        with deepspeed.zero.GatheredParameters([parameter]):
            full = parameter.detach().clone()
    else:
        full = parameter.detach()
    return full


def gathered(engine: Any, stream: Iterable[Travelling]) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors in the types that they are sent in, see `roll.strategies.hf.gather.Gather`.

    Weights that compute in the type that is sent, or in float32, are what is sent: ZeRO rounds them from its float32
    weights after every step. ZeRO 3 gathers them many at a time.
    """
    batch: list[tuple[str, Any, torch.dtype]] = []
    used = 0
    for name, tensor, dtype in stream:
        parameter: Any = tensor
        trained = parameter.requires_grad and _sharded(engine)
        exact = torch.float32 if trained else parameter.dtype
        dtype = dtype or exact
        computing = parameter.dtype in (dtype, exact)
        shards = computing and hasattr(parameter, "ds_id")
        size = parameter.ds_numel * parameter.element_size() if shards else 0
        if batch and (not shards or used + size > limit(parameter.device)):
            yield from _gathered_batch(batch)
            batch, used = [], 0
        if shards:
            batch.append((name, parameter, dtype))
            used += size
        elif computing:
            yield name, parameter.detach().to(dtype)
        else:
            full = full_tensor(engine, parameter)
            if trained or hasattr(parameter, "ds_id"):
                count_gathered(full.nbytes)
            yield name, full.to(dtype)
    if batch:
        yield from _gathered_batch(batch)


def _gathered_batch(batch: Sequence[tuple[str, Any, torch.dtype]]) -> Iterator[tuple[str, Tensor]]:
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter for _, parameter, _ in batch]):
        count_gathered(sum(parameter.nbytes for _, parameter, _ in batch))
        copies = [(name, parameter.detach().to(dtype, copy=True)) for name, parameter, dtype in batch]
    while copies:
        yield copies.pop(0)


def set_whole(engine: Any, parameter: Any, value: Tensor, moment: str | None = None) -> None:
    """Change a weight, which `publish` brings to the module that computes, or a moment that `make_moments` has made."""
    import deepspeed

    if parameter.requires_grad and _sharded(engine):
        _set_sharded(parameter, value, moment)
    elif moment:
        engine.optimizer.state[parameter][moment].copy_(value)
    elif hasattr(parameter, "ds_id"):
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(value)
    else:
        parameter.data.copy_(value)


def make_moments(engine: Any, step: int) -> None:
    """Make moments of zero as after `step` updates: AdamW makes them at its first update, too late to fill them."""
    optimizer = engine.optimizer
    base = optimizer.optimizer if _sharded(engine) else optimizer
    plain = isinstance(base, torch.optim.AdamW)
    for flat in _trained_tensors(engine):
        moments = {name: torch.zeros_like(flat, requires_grad=False) for name in MOMENTS}
        base.state[flat] = {"step": torch.tensor(float(step)) if plain else step, **moments}
    for group in base.param_groups:
        if not plain:
            group["step"] = step  # where the fused kernel counts
    link_moments(engine)


def link_moments(engine: Any) -> None:
    """Show `full_tensor` where the moments are.

    DeepSpeed does it itself at stages 1 and 2, but once the first parameter group is updated, when others have none.
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def publish(engine: Any) -> None:
    """Copy the float32 weights to those that compute."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
    elif _sharded(engine):
        optimizer._partition_all_parameters()
        for group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        for parameter in engine.module.parameters():
            # The second copies of `zero_hpz_partition_size`, which the next pass makes anew.
            parameter.ds_secondary_tensor = None
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def moves_states(engine: Any) -> bool:
    """Return whether DeepSpeed can move the states of this engine itself; None: a plain module without one."""
    return engine is not None and hasattr(engine.optimizer, "offload_states") and not engine.zero_offload_param()


def offload(engine: Any, parts: Iterable[StatePart], device: torch.device) -> None:
    """Take these parts off the device; `engine.reload_states` brings them all back.

    DeepSpeed moves float32 weights with the weights that compute, and moments, at stages 1 and 2, and at stage 3 if its
    fused optimizer runs. What stays where it is counts as nothing freed.
    """
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as States

    kinds = {
        "parameters": [States.lp_params, States.hp_params],
        "gradients": [States.lp_grads, States.contiguous_grad_buffer],
        "optimizer": [States.optim_states],
    }
    states = [state for part in sorted(parts) for state in kinds[part]]
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp16_partitioned_groups") and type(optimizer.optimizer) is not FusedAdam:
        states = [state for state in states if state not in (States.hp_params, States.optim_states)]
    engine.offload_states(include=states, pin_memory=device.type == "cuda")
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Anchor:
    """The gradient of strength / 2 * |weights - weights at the start|^2, on each rank for its part."""

    def __init__(self, engine: Any, strength: float) -> None:
        self._engine, self._strength = engine, strength
        trained = ((n, p) for n, p in engine.module.named_parameters() if p.requires_grad)
        self._start = {name: weight.clone() for name, weight, _ in self._parts(trained)}

    def _parts(self, named: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, Tensor, Any]]:
        """Yield (name, float32 weights of the part that this rank has gradients of, parameter)."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_local_fp32_param

        for name, parameter in named:
            if hasattr(parameter, "ds_id"):
                yield name, safe_get_local_fp32_param(parameter).detach(), parameter
            elif not _sharded(self._engine):
                yield name, parameter.detach(), parameter
            elif _whole_gradients(self._engine):
                yield name, safe_get_full_fp32_param(parameter), parameter
            elif parameter._hp_mapping is not None:
                yield name, parameter._hp_mapping.hp_fragment.detach(), parameter

    def pull(self) -> None:
        """Add the gradient to those of the last backward pass, before they are clipped."""
        from deepspeed.utils import safe_get_local_grad, safe_set_local_grad

        optimizer = self._engine.optimizer
        named = ((n, p) for n, p in self._engine.module.named_parameters() if p.requires_grad)
        for name, weight, parameter in self._parts(named):
            force = (weight - self._start[name]).mul_(self._strength)
            if hasattr(parameter, "ds_id"):
                safe_set_local_grad(parameter, safe_get_local_grad(parameter).view(-1) + force)
            elif not _sharded(self._engine):
                if parameter.grad is not None:
                    parameter.grad.add_(force)
            else:
                mapping = parameter._hp_mapping
                gradient = (
                    parameter._hp_grad
                    if _whole_gradients(self._engine)
                    else mapping.get_lp_grad_fragment(parameter._index_in_param_group)
                )
                gradient.add_(force.view_as(gradient))
                if optimizer.__dict__.get("cpu_offload"):
                    # Offloaded norms are taken while gradients come in.
                    optimizer.norm_for_param_grads[optimizer.get_param_id(parameter)] = gradient.norm(2)


def _sharded(engine: Any) -> bool:
    """Return whether ZeRO wraps the optimizer."""
    return hasattr(engine.optimizer, "optimizer")


def _whole_gradients(engine: Any) -> bool:
    """Return whether ZeRO 1 in bf16 sums float32 gradients of the whole model on every rank."""
    return hasattr(engine.optimizer, "fp32_groups_gradients")


def _trained_tensors(engine: Any) -> list[Tensor]:
    """Return what the optimizer updates: flat parts of this rank, or the parameters themselves."""
    optimizer = engine.optimizer
    if not _sharded(engine):
        return [p for group in optimizer.param_groups for p in group["params"]]
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    raise AssertionError(f"unknown optimizer {type(optimizer).__name__}")


def share_of(parameter: Any) -> tuple[int, int]:
    """Return where this rank's share of a tensor begins that ZeRO 3 has cut, and how many numbers aren't padding."""
    import deepspeed

    size = parameter.ds_tensor.numel()
    start = size * deepspeed.comm.get_rank(group=parameter.ds_process_group)
    return start, max(0, min(size, parameter.ds_numel - start))


def set_share(parameter: Any, share: Tensor, moment: str | None = None) -> None:
    """Change this rank's share of a float32 weight that ZeRO 3 has cut, padding included, or of a moment."""
    from deepspeed import utils

    if moment:
        utils.safe_set_local_optimizer_state(parameter, share, moment)
    else:
        utils.safe_set_local_fp32_param(parameter, share)


def _set_sharded(parameter: Any, value: Tensor, moment: str | None) -> None:
    from deepspeed import utils

    if hasattr(parameter, "ds_id"):
        # DeepSpeed's own cut of a whole ZeRO-3 tensor forgets the padding of the last rank.
        start, size = share_of(parameter)
        share = value.new_zeros(parameter.ds_tensor.numel())
        share[:size] = value.reshape(-1)[start : start + size]
        set_share(parameter, share, moment)
    elif moment:
        utils.safe_set_full_optimizer_state(parameter, value, moment)
    else:
        utils.safe_set_full_fp32_param(parameter, value)
