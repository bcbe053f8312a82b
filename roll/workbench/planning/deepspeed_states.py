"""Bytes of `deepspeed_*`: ZeRO's flat partitions (arXiv:1910.02054) as DeepSpeed 0.19 lays them out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from roll.configs.schema.deepspeed_config import DeepSpeedConfig
from roll.workbench.planning.fsdp2_states import COUNTER
from roll.workbench.planning.parameters import BYTES, Parameter
from roll.workbench.planning.states import States, offloaded

_ALIGNED = 2
"""Flat tensors are padded to a multiple of this many numbers per rank."""
_DEFAULTS: dict[str, Any] = {
    "reduce_bucket_size": 500_000_000,
    "contiguous_gradients": True,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_model_persistence_threshold": 2**63 - 1,
    "stage3_max_live_parameters": 1_000_000_000,
    "sub_group_size": 1_000_000_000,
}
"""Of DeepSpeed, where `zero_optimization` doesn't say."""


@dataclass(frozen=True, kw_only=True)
class _Role:
    parameters: Sequence[Parameter]
    options: DeepSpeedConfig
    ranks: int
    rank: int
    computed: int
    """Bytes of a number in the forward pass."""
    l2: bool

    def option(self, key: str) -> Any:
        explicit = self.options.zero_optimization.get(key, "auto")
        return _DEFAULTS[key] if explicit == "auto" else explicit

    @property
    def summed(self) -> int:
        """Return bytes of a number in sums of gradients over micro-batches."""
        explicit = (self.options.data_types or {}).get("grad_accum_dtype")
        return BYTES.get(explicit or "fp32", 4)

    @property
    def groups(self) -> list[list[Parameter]]:
        """Return what trains, in the optimizer's groups: matrices, and vectors."""
        trained = [parameter for parameter in self.parameters if parameter.trains]
        groups = ([p for p in trained if len(p.shape) > 1], [p for p in trained if len(p.shape) <= 1])
        return [group for group in groups if group]


def deepspeed_states(
    parameters: Sequence[Parameter],
    options: DeepSpeedConfig,
    *,
    ranks: int,
    rank: int,
    trains: bool,
    dtype: str,
    l2: bool,
) -> States:
    """Return the states of one rank of `ranks`; `dtype` is that of the role, `l2` whether it is pulled to its start."""
    role = _Role(parameters=parameters, options=options, ranks=ranks, rank=rank, computed=BYTES[dtype], l2=l2)
    if options.stage == 3:
        return _stage_3(role, trains=trains)
    if not trains or options.stage == 0:
        return _replicated(role, trains=trains)
    return _stages_1_and_2(role)


def _replicated(role: _Role, *, trains: bool) -> States:
    """Return states where every rank has everything, trained weights in float32."""
    trained = [parameter for parameter in role.parameters if parameter.trains] if trains else []
    size = sum(parameter.size for parameter in trained)
    return States(
        weights=sum(parameter.nbytes for parameter in role.parameters),
        gradients=sum(parameter.nbytes for parameter in trained),
        optimizer=8 * size + COUNTER * len(trained) + (4 * size if role.l2 else 0),
    )


def _stages_1_and_2(role: _Role) -> States:
    """Return states with whole weights that compute, and a part of each group's float32 weights and moments."""
    frozen = sum(parameter.size for parameter in role.parameters if not parameter.trains)
    weights, optimizer, gradients, retained_gradients = frozen * role.computed, 0, 0, 0
    unit = _ALIGNED * role.ranks
    for group in role.groups:
        sizes = [parameter.size for parameter in group]
        flat = -(-sum(sizes) // unit) * unit
        part = flat // role.ranks
        weights += flat * role.computed
        optimizer += 3 * 4 * part + COUNTER
        sums_full = role.computed == 2 and role.summed == 4 and role.options.stage == 1
        if role.l2:
            own = max(0, min(part, sum(sizes) - role.rank * part))  # the start of the weights, without padding
            optimizer += 4 * (sum(sizes) if sums_full else own)
        if sums_full:
            # The gradients of all weights in float32 stay; those in half precision go with the step.
            retained_gradients += flat * 4
            gradients += flat * 4 + sum(sizes) * role.computed
        elif role.computed == 2 and role.summed == 4:
            gradients += part * 4
        else:
            # Whole gradients of whatever lies in the rank's part, be it the end of a tensor alone.
            first, last = role.rank * part, (role.rank + 1) * part
            ends = list(accumulate(sizes))
            inside = [s for s, end in zip(sizes, ends, strict=True) if end > first and end - s < last]
            gradients += sum(inside) * role.computed
    buckets = 0
    if role.option("contiguous_gradients"):
        most = role.option("reduce_bucket_size") * (2 if role.options.zero_optimization.get("overlap_comm") else 1)
        buckets = most * (4 if role.options.stage == 1 and role.summed == 4 else role.computed)
    if not role.options.offloads("offload_optimizer"):
        return States(
            weights=weights,
            gradients=gradients,
            retained_gradients=retained_gradients,
            optimizer=optimizer,
            passing=buckets,
        )
    parts = [-(-sum(parameter.size for parameter in group) // unit) * _ALIGNED for group in role.groups]
    # The largest gradient has a place to travel through on either side, and new weights of the part one on the host.
    window = max((parameter.size for group in role.groups for parameter in group), default=0) * role.computed
    return States(
        weights=weights,
        gradients=sum(parts) * 4 if role.computed == 2 else 0,
        buffers=window,
        passing=buckets,
        host_gradients=sum(parts) * 4,
        host_optimizer=optimizer + sum(parts) * role.computed + window,
    )


def _stage_3(role: _Role, *, trains: bool) -> States:
    """Return states with each tensor cut into equal parts; small ones stay whole once they were gathered."""
    threshold, most = (
        role.option("stage3_param_persistence_threshold"),
        role.option("stage3_model_persistence_threshold"),
    )
    weights, unsharded, trained, counters = 0, 0, 0, 0
    for parameter in role.parameters:
        weights += -(-parameter.size // role.ranks)
        if parameter.size <= threshold and unsharded + parameter.size <= most:
            unsharded += parameter.size
    for group in role.groups if trains else []:
        sizes = [-(-parameter.size // role.ranks) for parameter in group]
        trained += sum(sizes)
        counters += _sub_groups(sizes, sum(parameter.size for parameter in group), role.option("sub_group_size"))
    gathered = min(sum(p.size for p in role.parameters) - unsharded, role.option("stage3_max_live_parameters"))
    bucket = role.option("reduce_bucket_size") if trains and role.option("contiguous_gradients") else 0
    states = States(
        weights=(weights + unsharded) * role.computed,
        gradients=trained * role.summed,
        retained_gradients=trained * role.summed,
        optimizer=(3 + role.l2) * 4 * trained + COUNTER * counters,
        buffers=bucket * _communicated(role),
        gathered=gathered * role.computed,
    )
    if role.options.offloads("offload_optimizer"):
        # Float32 gradients of the part stand beside the sums.
        states = replace(offloaded(states), host_gradients=trained * (role.summed + 4))
    if role.options.offloads("offload_param"):
        parts = weights * role.computed
        states = replace(states, weights=unsharded * role.computed, host_weights=parts)
    return states


def _communicated(role: _Role) -> int:
    """Return bytes of a number while it is summed over ranks."""
    return BYTES[role.options.communication_data_type or "fp32"]


def _sub_groups(parts: Sequence[int], total: int, limit: int) -> int:
    """Return the flat tensors that the optimizer steps on one after the other."""
    if limit >= total:
        return 1
    count, size = 0, 0
    for number, part in enumerate(parts):
        size += part
        if size >= limit or number == len(parts) - 1:
            count, size = count + 1, 0
    return count
