"""Bytes of `fsdp2_*`: torch's `fully_shard` of every decoder layer, and of the rest."""

from __future__ import annotations

from collections.abc import Sequence

from roll.configs.schema.strategy_config import Fsdp2Config
from roll.utils.partition import shard_dim
from roll.workbench.planning.parameters import BYTES, Parameter
from roll.workbench.planning.states import States, offloaded

COUNTER = 4
"""Bytes of the step that torch's AdamW keeps for each of its tensors."""


def fsdp2_states(
    parameters: Sequence[Parameter],
    options: Fsdp2Config,
    *,
    ranks: int,
    rank: int,
    trains: bool,
    dtype: str,
    l2: bool,
    muon: bool = False,
) -> States:
    """Return the states of one rank of `ranks`; `dtype` is that of the role, `l2` whether it is pulled to its start.

    With `muon` the matrices of the decoder layers have its momentum, everything else the moments of AdamW.

    Several ranks cut each tensor along one dimension. A shard is as long as the longest one, where rows don't divide;
    moments are as long as the rank's own part.
    """
    shards = options.fsdp_size or ranks if ranks > 1 else 1
    shard = rank % shards
    trained = [parameter for parameter in parameters if parameter.trains]
    weights = sum(_padded(p, shards) * p.width for p in parameters)
    gradients = sum(_padded(p, shards) * 4 for p in trained) if trains else 0
    by_muon = {p.name for p in trained if muon and p.block is not None and len(p.shape) > 1}
    moments = 0
    for parameter in trained if trains else ():
        own = _own(parameter, shards, shard) * 4
        moments += own if parameter.name in by_muon else 2 * own + COUNTER
    anchor = sum(_own(p, shards, shard) * 4 for p in trained) if trains and l2 else 0
    computed = BYTES[options.param_dtype or dtype]
    states = States(
        weights=weights,
        gradients=gradients,
        optimizer=moments + anchor,
        gathered=_gathered(parameters, computed, options) + _reordered(parameters, computed, shards)
        if ranks > 1
        else 0,
    )
    return offloaded(states, weights=True) if options.offload_policy and ranks > 1 else states


def _padded(parameter: Parameter, shards: int) -> int:
    """Return numbers in every rank's shard."""
    rows = parameter.shape[shard_dim(parameter.shape, shards)]
    return -(-rows // shards) * (parameter.size // rows)


def _own(parameter: Parameter, shards: int, shard: int) -> int:
    """Return numbers of the shard that aren't padding."""
    rows = parameter.shape[shard_dim(parameter.shape, shards)]
    most = -(-rows // shards)
    return max(0, min(most, rows - shard * most)) * (parameter.size // rows)


def _gathered(parameters: Sequence[Parameter], computed: int, options: Fsdp2Config) -> int:
    """Return whole weights on a rank: the layer that computes, the next one, and what belongs to no layer."""
    groups: dict[int | None, int] = {}
    for parameter in parameters:
        groups[parameter.block] = groups.get(parameter.block, 0) + parameter.size * computed
    outside = groups.pop(None, 0)
    layers = list(groups.values())
    if not (options.reshard_after_forward and options.shard_between_micro_batches):
        return outside + sum(layers)
    return outside + sum(sorted(layers)[-2:])


def _reordered(parameters: Sequence[Parameter], computed: int, shards: int) -> int:
    """Return copies from which the rows of a layer's experts, that come rank by rank, are put in order."""
    layers: dict[int | None, int] = {}
    for parameter in parameters:
        if shard_dim(parameter.shape, shards):
            layers[parameter.block] = layers.get(parameter.block, 0) + parameter.size * computed
    return max(layers.values(), default=0)
