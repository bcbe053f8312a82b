"""Bytes of `megatron_*`: chunks of the model, and Megatron-core's buffers and optimizers over them.

Layouts follow Megatron-core 0.16: parameters in reverse order in one buffer per chunk and kind of data parallelism,
with padding where the distributed optimizer cuts it into equal parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from roll.configs.schema.megatron_config import MegatronConfig
from roll.workbench.planning.architecture import Architecture
from roll.workbench.planning.fsdp2_states import COUNTER
from roll.workbench.planning.parameters import BYTES
from roll.workbench.planning.states import States, offloaded

_PARAM_START, _BUCKET_END = 64, 128
"""Numbers: where a parameter may begin in a buffer, and what the length of a bucket is a multiple of."""
_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000
"""Numbers in a bucket, at least and per rank, where sums overlap with the backward pass."""


@dataclass(frozen=True)
class LocalParameter:
    """A parameter as one rank holds it."""

    size: int
    trains: bool = True
    expert: bool = False
    """Summed over fewer ranks than the others."""
    own_bucket: bool = False
    """An embedding that another pipeline stage has as its head."""


@dataclass(frozen=True, kw_only=True)
class MegatronPlace:
    """Where one rank stands in a layout."""

    options: MegatronConfig
    ranks: int
    rank: int

    @property
    def stages(self) -> int:
        """Return the pipeline stages."""
        return self.options.pipeline_model_parallel_size

    @property
    def stage(self) -> int:
        """Return this rank's."""
        return self.rank // (self.ranks // self.stages)

    @property
    def expert_tensor(self) -> int:
        """Return ranks that share the matrices of an expert."""
        return self.options.expert_tensor_parallel_size or self.options.tensor_model_parallel_size

    @property
    def separate_experts(self) -> bool:
        """Return whether experts are summed over other ranks than the rest of the model."""
        options = self.options
        tensor = options.tensor_model_parallel_size
        return options.expert_model_parallel_size > 1 or self.expert_tensor != tensor

    def copies(self, *, expert: bool) -> tuple[int, int]:
        """Return (this rank's place among those that hold the same parameters, how many these are)."""
        together = self.options.tensor_model_parallel_size
        if expert:
            together = self.expert_tensor * self.options.expert_model_parallel_size
        of_stage = self.ranks // self.stages
        return self.rank % of_stage // together, of_stage // together

    def chunks(self, layers: int) -> list[range]:
        """Return layers of each virtual stage of this rank."""
        virtual = self.options.virtual_pipeline_model_parallel_size or 1
        each = layers // (self.stages * virtual)
        starts = (number * layers // virtual + self.stage * each for number in range(virtual))
        return [range(start, start + each) for start in starts]


def chunk_parameters(
    arch: Architecture, position: MegatronPlace, *, kind: str, frozen: Sequence[str] = ()
) -> list[list[LocalParameter]]:
    """Return the parameters of each of a rank's chunks, in Megatron's order; `frozen`: beginnings of names."""
    chunks, prefix = position.chunks(arch.layers), "" if kind == "value" else "model."
    first, last = position.stage == 0, position.stage == position.stages - 1
    tensor = position.options.tensor_model_parallel_size
    shares = kind == "policy" and arch.tied

    def trains(name: str) -> bool:
        return not (frozen and f"{prefix}{name}".startswith(tuple(frozen)))

    vocabulary = -(-arch.vocab // tensor) * arch.hidden
    made = []
    for number, layers in enumerate(chunks):
        here: list[LocalParameter] = []
        own_bucket = shares and position.stages > 1
        if first and number == 0:
            here.append(LocalParameter(vocabulary, trains("embed_tokens.weight"), own_bucket=own_bucket))
        for layer in layers:
            for name, size, expert in layer_sizes(arch, position, layer):
                here.append(
                    LocalParameter(size, trains(f"layers.{layer}.{name}"), expert and position.separate_experts)
                )
        if last and number == len(chunks) - 1:
            here.append(LocalParameter(arch.hidden, trains("norm.weight")))
            if kind != "policy":
                here.append(LocalParameter(arch.hidden))
            elif not shares:
                # Named without the prefix of the backbone.
                free = not (frozen and "lm_head.weight".startswith(tuple(frozen)))
                here.append(LocalParameter(vocabulary, free))
            elif position.stages > 1:
                here.append(LocalParameter(vocabulary, trains("embed_tokens.weight"), own_bucket=True))
        made.append(here)
    return made


def layer_sizes(arch: Architecture, position: MegatronPlace, layer: int) -> Iterator[tuple[str, int, bool]]:
    """Yield (Hugging Face name, numbers on a rank, of an expert) of each parameter of a layer."""
    tensor, hidden = position.options.tensor_model_parallel_size, arch.hidden
    yield "input_layernorm.weight", hidden, False
    yield "self_attn.o_proj.weight", hidden * arch.query // tensor, False
    rows = (arch.query + 2 * arch.key) // tensor
    yield "self_attn.q_proj.weight", rows * hidden, False
    if arch.qkv_bias:
        yield "self_attn.q_proj.bias", rows, False
    if arch.decoder.qk_norm == "head":
        yield "self_attn.q_norm.weight", arch.head_dim, False
        yield "self_attn.k_norm.weight", arch.head_dim, False
    yield "post_attention_layernorm.weight", hidden, False
    if not arch.sparse[layer]:
        yield "mlp.gate_proj.weight", 2 * arch.intermediate // tensor * hidden, False
        yield "mlp.down_proj.weight", arch.intermediate // tensor * hidden, False
        return
    yield "mlp.gate.weight", arch.experts * hidden, False
    width = arch.expert_width // position.expert_tensor
    for _ in range(arch.experts // position.options.expert_model_parallel_size):
        yield "mlp.experts.gate_up_proj", 2 * width * hidden, True
        yield "mlp.experts.down_proj", width * hidden, True
    if arch.shared_width:
        shared = arch.shared_width // tensor
        yield "mlp.shared_expert_gate.weight", hidden, False
        yield "mlp.shared_expert.gate_proj.weight", 2 * shared * hidden, False
        yield "mlp.shared_expert.down_proj.weight", shared * hidden, False


def megatron_states(
    arch: Architecture,
    options: MegatronConfig,
    *,
    ranks: int,
    rank: int,
    kind: str,
    trains: bool,
    dtype: str,
    l2: bool,
    frozen: Sequence[str] = (),
) -> States:
    """Return the states of one rank of `ranks`; `dtype` is that of the role, `l2` whether it is pulled to its start."""
    position, width = MegatronPlace(options=options, ranks=ranks, rank=rank), BYTES[dtype]
    chunks = chunk_parameters(arch, position, kind=kind, frozen=frozen)
    if not trains:
        return States(weights=width * sum(parameter.size for chunk in chunks for parameter in chunk))
    weights, gradients, optimizer = 0, 0, 0
    for number, chunk in enumerate(chunks):
        weights += width * sum(parameter.size for parameter in chunk if not parameter.trains)
        for expert in (False, True):
            held = [parameter for parameter in chunk if parameter.trains and parameter.expert == expert]
            index, copies = position.copies(expert=expert)
            distributed = options.use_distributed_optimizer
            buckets = bucket_layout(held, options, copies, bucketed=number == 0 and position.stage == 0)
            total = buckets[-1][1] if buckets else 0
            weights += width * (total if distributed else sum(parameter.size for parameter in held))
            gradients += 4 * total
            own = [parameter.size for parameter in held]
            if distributed:
                own = [size for start, end, inside in buckets for size in _overlaps(start, end, inside, index, copies)]
            # Moments, and float32 weights beside those in half precision.
            optimizer += (8 + (4 if width == 2 else 0) + 4 * l2) * sum(own) + COUNTER * len(own)
    states = States(weights=weights, gradients=gradients, retained_gradients=gradients, optimizer=optimizer)
    if options.optimizer_cpu_offload:
        return States(
            weights=weights,
            gradients=gradients,
            retained_gradients=gradients,
            host_optimizer=offloaded(states).host_optimizer,
        )
    return states


def bucket_layout(
    held: Sequence[LocalParameter], options: MegatronConfig, copies: int, *, bucketed: bool
) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Return (start, end, [(start, end) of each parameter]) of the buckets of a buffer, in numbers."""
    padded = options.use_distributed_optimizer
    most = max(_BUCKET, _BUCKET_PER_RANK * copies) if options.overlap_grad_reduce and bucketed else math.inf
    buckets: list[tuple[int, int, list[tuple[int, int]]]] = []
    inside: list[tuple[int, int]] = []
    start = bucket_start = 0

    def close(end: int) -> int:
        nonlocal inside, bucket_start
        unit = math.lcm(copies, _BUCKET_END) if padded else 1
        end = -(-end // unit) * unit
        buckets.append((bucket_start, end, inside))
        inside, bucket_start = [], end
        return end

    for parameter in reversed(held):
        alone = parameter.own_bucket and padded
        if padded:
            start = -(-start // _PARAM_START) * _PARAM_START
        if alone and inside:
            start = close(inside[-1][1])
        end = start + parameter.size
        inside.append((start, end))
        start = close(end) if alone or end - bucket_start >= most else end
    if inside:
        close(inside[-1][1])
    return buckets


def _overlaps(start: int, end: int, inside: Sequence[tuple[int, int]], index: int, copies: int) -> list[int]:
    """Return numbers of each parameter that lie in this rank's part of a bucket, where there are any."""
    part = (end - start) // copies
    low, high = start + index * part, start + (index + 1) * part
    sizes = (min(high, last) - max(low, first) for first, last in inside)
    return [size for size in sizes if size > 0]
