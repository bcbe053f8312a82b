"""What passes through Megatron-core's layers take: split by tensor, context and pipeline parallelism."""

from __future__ import annotations

from dataclasses import replace

from roll.configs.schema.megatron_config import MegatronConfig
from roll.workbench.planning.activations import (
    Activations,
    MicroBatchShape,
    Numbers,
    forward_bytes,
    layer_bytes,
    moment_bytes,
)
from roll.workbench.planning.architecture import Architecture


def megatron_activations(
    arch: Architecture,
    options: MegatronConfig,
    numbers: Numbers,
    batch: MicroBatchShape,
    *,
    kind: str,
    checkpointed: bool,
    stage: int,
    micro_batches: int,
) -> Activations:
    """Return what one rank saves: a stage keeps several micro-batches on their way through the pipeline."""
    tensor, stages = options.tensor_model_parallel_size, options.pipeline_model_parallel_size
    virtual = options.virtual_pipeline_model_parallel_size or 1
    tokens = -(-batch.tokens // options.context_parallel_size)
    scored = -(-batch.scored // options.context_parallel_size)
    each = max(1, arch.layers // (stages * virtual))
    chunks = _chunks_under_way(stage, stages, virtual, micro_batches)
    split = tensor if options.sequence_parallel else 1
    inputs = numbers.residual * arch.hidden // split
    sparse = any(arch.sparse)
    layer = layer_bytes(arch, numbers, sparse=sparse, masked=False, shared=tensor)
    if options.sequence_parallel:
        # What isn't split by heads and widths is split by tokens.
        replicated = layer_bytes(arch, numbers, sparse=sparse, masked=False, shared=10**9)
        layer -= replicated - replicated // tensor
    granularity = options.recompute_granularity or ("full" if checkpointed else None)
    if granularity == "full":
        step = options.recompute_num_layers or 1
        if options.recompute_method == "block":
            saved = inputs * min(step, each) + layer * max(0, each - step)
            step = 1
        else:
            saved = inputs * -(-each // step)
        again = layer * step - inputs
    else:
        saved, again = layer * each, 0
    moment = tokens * (again + moment_bytes(arch, numbers, sparse=sparse, shared=tensor))
    last = stage == stages - 1
    head = _head(arch, numbers, scored, tensor) if last and kind == "policy" else 8 * scored
    ends = tokens * arch.hidden * numbers.residual * (2 if last or stage == 0 else 1)
    if options.sequence_parallel:
        ends += tokens * arch.hidden * numbers.computed  # what is gathered from the tensor-parallel ranks has a place
    return Activations(saved=tokens * saved * chunks + ends, moment=moment, logits=head)


def _chunks_under_way(stage: int, stages: int, virtual: int, micro_batches: int) -> int:
    """Return passes whose activations a stage keeps at once, each of one of its chunks (1F1B, arXiv:2104.04473)."""
    if stages == 1:
        return 1
    if virtual == 1:
        return min(micro_batches, stages - stage)
    rounded = -(-micro_batches // stages) * stages
    return min(rounded * virtual, (stages - stage - 1) * 2 + (virtual - 1) * stages + 1)


def _head(arch: Architecture, numbers: Numbers, scored: int, tensor: int) -> int:
    """Return the product of a chunk, its float32 copy and gradient, and the gradient of the head's weight."""
    vocab = -(-arch.vocab // tensor)
    chunk = min(scored, max(1, numbers.chunk // vocab)) * vocab
    product = 0 if numbers.computed == 4 else chunk * numbers.computed
    return product + 2 * 4 * chunk + vocab * arch.hidden * 4


def megatron_forward_bytes(
    arch: Architecture, options: MegatronConfig, numbers: Numbers, batch: MicroBatchShape, *, kind: str
) -> int:
    """Return bytes of a pass without gradients."""
    parts = options.context_parallel_size
    shard = replace(batch, tokens=-(-batch.tokens // parts), scored=-(-batch.scored // parts), packed=True)
    return forward_bytes(arch, numbers, shard, kind=kind, shared=options.tensor_model_parallel_size)
