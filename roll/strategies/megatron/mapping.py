"""Which Hugging Face tensors each Megatron parameter is made of: one table, read in both directions.

A parameter is a list of segments of its tensors along one dimension, in Megatron's order; a tensor-parallel rank holds
an equal share of that list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from roll.strategies.megatron.megatron_architecture import MegatronArchitecture


@dataclass(frozen=True)
class HfTensor:
    """A tensor of the transformers module. Of experts: the part of one, the module has them stacked."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Segment:
    """`start` to `stop` of a tensor (its number in the entry) along the entry's dimension; None: zeros."""

    tensor: int | None
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Return rows or columns."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class MappedParameter:
    """One Megatron parameter."""

    parameters: tuple[str, ...]
    """Its name in the chunk or layer; several where implementations differ. {expert} is the number on this rank."""
    tensors: tuple[HfTensor, ...]
    segments: tuple[Segment, ...]
    dim: int | None = None
    """What the segments and the ranks divide; None: every rank has all of the only tensor."""
    experts: int = 0
    """Number of experts that have such a parameter; 0: not one of the experts."""

    def share(self, rank: int, ranks: int) -> list[Segment]:
        """Return the segments that `rank` of `ranks` holds, in order."""
        if self.dim is None:
            return list(self.segments)
        total = sum(segment.size for segment in self.segments)
        assert total % ranks == 0, f"{self.parameters[0]}: {total} can't be divided by {ranks}"
        first, last = rank * total // ranks, (rank + 1) * total // ranks
        held, position = [], 0
        for segment in self.segments:
            low, high = max(first, position), min(last, position + segment.size)
            if low < high:
                offset = segment.start - position
                held.append(Segment(segment.tensor, offset + low, offset + high))
            position += segment.size
        return held


class WeightTable:
    """All entries of an architecture. `tensor` and `expert_tensor`: ranks that share a matrix, and one of an expert.

    Names are those of the backbone, without the `model.` that a causal language model puts before them.
    """

    def __init__(self, arch: MegatronArchitecture, *, tensor: int = 1, expert_tensor: int = 1) -> None:
        self.arch = arch
        self._tensor, self._expert_tensor = tensor, expert_tensor

    @property
    def embedding(self) -> MappedParameter:
        """Return the token embedding, with rows of zeros up to a multiple of the ranks."""
        return self._vocabulary("embedding.word_embeddings.weight", "embed_tokens.weight")

    @property
    def final_norm(self) -> MappedParameter:
        """Return the norm after the last layer."""
        return self._whole("decoder.final_layernorm.weight", "norm.weight", self.arch.hidden)

    @property
    def head(self) -> MappedParameter:
        """Return the output layer; of a tied model a copy of the embedding, on another pipeline stage."""
        return self._vocabulary("output_layer.weight", "embed_tokens.weight" if self.arch.tied else "lm_head.weight")

    def layer(self, number: int) -> Iterator[MappedParameter]:
        """Yield entries of layer `number`, parameter names relative to the layer."""
        prefix = f"layers.{number}."
        mlp, hidden = prefix + "mlp.", self.arch.hidden
        yield from self._attention(prefix + "self_attn.")
        norms = ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
        yield self._whole(norms, prefix + "input_layernorm.weight", hidden)
        norms = ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
        yield self._whole(norms, prefix + "post_attention_layernorm.weight", hidden)
        if self.arch.sparse[number]:
            yield from self._experts(mlp)
        else:
            yield from self._mlp("mlp.", mlp, self.arch.ffn)

    # --- pieces ----------------------------------------------------------------------------------------------------

    def _vocabulary(self, parameter: str, name: str) -> MappedParameter:
        vocab = self.arch.vocab
        padding = -vocab % self._tensor
        return MappedParameter(
            parameters=(parameter,),
            tensors=(HfTensor(name, (vocab, self.arch.hidden)),),
            segments=(Segment(0, 0, vocab), Segment(None, 0, padding)),
            dim=0,
        )

    def _whole(
        self, parameters: str | tuple[str, ...], name: str, *shape: int, dim: int | None = None, experts: int = 0
    ) -> MappedParameter:
        """Return a parameter that is one tensor, in its own order."""
        return MappedParameter(
            parameters=(parameters,) if isinstance(parameters, str) else parameters,
            tensors=(HfTensor(name, shape),),
            segments=(Segment(0, 0, shape[dim or 0]),),
            dim=dim,
            experts=experts,
        )

    def _attention(self, hf: str) -> Iterator[MappedParameter]:
        arch = self.arch
        query = arch.heads * arch.head_dim
        yield self._qkv("weight", hf, (arch.hidden,))
        if arch.qkv_bias:
            yield self._qkv("bias", hf, ())
        if arch.qk_norm:
            yield self._whole("self_attention.q_layernorm.weight", hf + "q_norm.weight", arch.head_dim)
            yield self._whole("self_attention.k_layernorm.weight", hf + "k_norm.weight", arch.head_dim)
        yield self._whole("self_attention.linear_proj.weight", hf + "o_proj.weight", arch.hidden, query, dim=1)

    def _qkv(self, what: str, hf: str, columns: tuple[int, ...]) -> MappedParameter:
        """Return the order of a fused one per key head: the queries that share it, the key, the value."""
        arch = self.arch
        query, key = arch.heads // arch.kv_heads * arch.head_dim, arch.head_dim
        segments = []
        for group in range(arch.kv_heads):
            segments.append(Segment(0, group * query, (group + 1) * query))
            segments.extend(Segment(tensor, group * key, (group + 1) * key) for tensor in (1, 2))
        sizes = (query, key, key)
        tensors = (
            HfTensor(f"{hf}{name}_proj.{what}", (arch.kv_heads * size, *columns))
            for name, size in zip("qkv", sizes, strict=True)
        )
        return MappedParameter(
            parameters=(f"self_attention.linear_qkv.{what}",), tensors=tuple(tensors), segments=tuple(segments), dim=0
        )

    def _mlp(self, megatron: str, hf: str, width: int) -> Iterator[MappedParameter]:
        tensors = (HfTensor(f"{hf}{name}_proj.weight", (width, self.arch.hidden)) for name in ("gate", "up"))
        segments = gate_up(width, self._tensor, up=1)
        yield MappedParameter(
            parameters=(megatron + "linear_fc1.weight",), tensors=tuple(tensors), segments=segments, dim=0
        )
        yield self._whole(megatron + "linear_fc2.weight", hf + "down_proj.weight", self.arch.hidden, width, dim=1)

    def _experts(self, hf: str) -> Iterator[MappedParameter]:
        arch, width = self.arch, self.arch.expert_ffn
        yield self._whole("mlp.router.weight", hf + "gate.weight", arch.experts, arch.hidden, dim=None)
        yield MappedParameter(
            parameters=expert_parameters("linear_fc1", "weight1"),
            tensors=(HfTensor(hf + "experts.gate_up_proj", (2 * width, arch.hidden)),),
            segments=gate_up(width, self._expert_tensor, up=0),
            dim=0,
            experts=arch.experts,
        )
        names = expert_parameters("linear_fc2", "weight2")
        yield self._whole(names, hf + "experts.down_proj", arch.hidden, width, dim=1, experts=arch.experts)
        if arch.shared_ffn:
            yield from self._mlp("mlp.shared_experts.", hf + "shared_expert.", arch.shared_ffn)
            yield self._whole(
                "mlp.shared_experts.gate_weight", hf + "shared_expert_gate.weight", 1, arch.hidden, dim=None
            )


def gate_up(width: int, ranks: int, *, up: int) -> tuple[Segment, ...]:
    """Return gate and up projections of a gated MLP: each rank has its share of one, then of the other.

    `up` is the tensor of the up projection; 0: it follows the gate's rows in the same one.
    """
    share, offset = width // ranks, 0 if up else width
    segments = []
    for rank in range(ranks):
        first, last = rank * share, (rank + 1) * share
        segments += [Segment(0, first, last), Segment(up, offset + first, offset + last)]
    return tuple(segments)


def expert_parameters(linear: str, stacked: str) -> tuple[str, ...]:
    """Return experts one by one, in Transformer Engine's grouped layer, and all in one transposed matrix."""
    return (
        f"mlp.experts.local_experts.{{expert}}.{linear}.weight",
        f"mlp.experts.{linear}.weight{{expert}}",
        f"mlp.experts.{stacked}",
    )
