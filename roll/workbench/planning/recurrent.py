"""Layers with a recurrent state in place of attention: their weights by name and shape, and the size of their state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Number: TypeAlias = Callable[..., int]
"""From names of fields to the first of them that a configuration has as a whole number."""


@dataclass(frozen=True)
class Weight:
    """One parameter of the model as transformers has it; tied ones appear once."""

    name: str
    """Inside its decoder layer, or of the whole model."""
    shape: tuple[int, ...]
    linear: bool = False
    """The matrix of a linear layer, which adapters can adapt."""

    @property
    def size(self) -> int:
        """Return numbers in it."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class DeltaRule:
    """Layers of a gated delta rule behind a short convolution."""

    key: int
    """Width of all key heads, and that of all query heads."""
    value_heads: int
    value_head_dim: int
    key_head_dim: int
    kernel: int
    """Tokens that the convolution sees."""
    fused: bool
    """Whether its input projections are two matrices, else four."""

    @classmethod
    def read(cls, number: Number, form: Literal["fused", "apart"]) -> DeltaRule:
        """Return what a configuration says of it."""
        return cls(
            key=number("linear_num_key_heads") * number("linear_key_head_dim"),
            value_heads=number("linear_num_value_heads"),
            value_head_dim=number("linear_value_head_dim"),
            key_head_dim=number("linear_key_head_dim"),
            kernel=number("linear_conv_kernel_dim"),
            fused=form == "fused",
        )

    @property
    def value(self) -> int:
        """Return the width of all value heads."""
        return self.value_heads * self.value_head_dim

    @property
    def convolved(self) -> int:
        """Return the width of queries, keys and values together."""
        return 2 * self.key + self.value

    @property
    def states(self) -> int:
        """Return numbers of a row's state and of the tokens that the convolution remembers."""
        return self.value * self.key_head_dim + self.convolved * self.kernel

    def weights(self, hidden: int) -> Iterator[Weight]:
        """Yield the weights of a layer, in the order of the module."""
        yield Weight("linear_attn.dt_bias", (self.value_heads,))
        yield Weight("linear_attn.A_log", (self.value_heads,))
        yield Weight("linear_attn.conv1d.weight", (self.convolved, 1, self.kernel))
        norm = Weight("linear_attn.norm.weight", (self.value_head_dim,))
        out = Weight("linear_attn.out_proj.weight", (hidden, self.value), linear=True)
        if self.fused:
            for name, width in (("qkvz", self.convolved + self.value), ("ba", 2 * self.value_heads)):
                yield Weight(f"linear_attn.in_proj_{name}.weight", (width, hidden), linear=True)
            yield from (norm, out)
            return
        yield from (norm, out)
        widths = {"qkv": self.convolved, "z": self.value, "b": self.value_heads, "a": self.value_heads}
        for name, width in widths.items():
            yield Weight(f"linear_attn.in_proj_{name}.weight", (width, hidden), linear=True)


@dataclass(frozen=True, kw_only=True)
class StateSpace:
    """State-space layers (Mamba-2) behind a short convolution."""

    heads: int
    head_dim: int
    groups: int
    """Groups of heads that share inputs and outputs of the state."""
    state: int
    """Numbers of the state for each of a head's."""
    kernel: int
    """Tokens that the convolution sees."""
    chunk: int
    """Tokens that are computed at once."""
    conv_bias: bool
    proj_bias: bool

    @classmethod
    def read(cls, number: Number, tree: Mapping[str, Any], hidden: int) -> StateSpace:
        """Return what a configuration says of it."""
        heads, head_dim = number("mamba_n_heads"), tree.get("mamba_d_head", "auto")
        return cls(
            heads=heads,
            head_dim=number("mamba_expand") * hidden // heads if head_dim == "auto" else int(head_dim),
            groups=number("mamba_n_groups"),
            state=number("mamba_d_state"),
            kernel=number("mamba_d_conv"),
            chunk=number("mamba_chunk_size"),
            conv_bias=bool(tree.get("mamba_conv_bias", True)),
            proj_bias=bool(tree.get("mamba_proj_bias", False)),
        )

    @property
    def value(self) -> int:
        """Return the width of all heads."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Return the width of heads, inputs and outputs of the state together."""
        return self.value + 2 * self.groups * self.state

    @property
    def states(self) -> int:
        """Return numbers of a row's state and of the tokens that the convolution remembers."""
        return self.value * self.state + self.convolved * self.kernel

    def weights(self, hidden: int) -> Iterator[Weight]:
        """Yield the weights of a layer, in the order of the module."""
        for name in ("dt_bias", "A_log", "D"):
            yield Weight(f"mamba.{name}", (self.heads,))
        yield Weight("mamba.conv1d.weight", (self.convolved, 1, self.kernel))
        if self.conv_bias:
            yield Weight("mamba.conv1d.bias", (self.convolved,))
        width = self.value + self.convolved + self.heads
        yield Weight("mamba.in_proj.weight", (width, hidden), linear=True)
        if self.proj_bias:
            yield Weight("mamba.in_proj.bias", (width,))
        yield Weight("mamba.norm.weight", (self.value,))
        # Kernels take this matrix and don't call the layer: no adapters.
        yield Weight("mamba.out_proj.weight", (hidden, self.value))
        if self.proj_bias:
            yield Weight("mamba.out_proj.bias", (hidden,))


def recurrent_layers(tree: Mapping[str, Any], layers: int, mixer: DeltaRule | StateSpace) -> tuple[bool, ...]:
    """Return which layers are no attention: by their types; without them all state-space layers, and all of a delta
    rule but each `full_attention_interval`th."""
    kinds, interval = tree.get("layer_types") or tree.get("layers_block_type"), tree.get("full_attention_interval", 4)
    if isinstance(kinds, list):
        return tuple(kind in ("linear_attention", "mamba") for kind in kinds[:layers])
    return tuple(isinstance(mixer, StateSpace) or bool((layer + 1) % interval) for layer in range(layers))
