"""A decoder's weights by name and shape, from its config.json: what transformers will build."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from roll.configs.catalog.family_table import FAMILIES, Decoder, Experts, family_of
from roll.configs.schema.model_shape import config_file


def known_sizes(name: str) -> dict[str, Any] | None:
    """Return the entries of config.json that sizes follow from, of a hub id, also of its -Instruct or -Base form."""
    pretrained = re.sub(r"-(Instruct|Base)(-\d{4})?$", "", name)
    for model_type, family in FAMILIES.items():
        if pretrained in family.models:
            return {"model_type": model_type, **family.models[pretrained]}
    return None


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


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder of attention, or of a gated delta rule in some layers, and gated MLPs, dense or with experts."""

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the dense MLPs."""
    vocab: int
    tied: bool
    """The head is the embedding."""
    qkv_bias: bool
    other_bias: bool
    """Of the attention's output."""
    mlp_bias: bool
    experts: int = 0
    expert_width: int = 0
    experts_per_token: int = 0
    shared_width: int = 0
    """Width of an expert that every token passes; 0: none."""
    sparse: tuple[bool, ...] = ()
    """Which layers have experts."""
    positions: int | None = None
    delta_rule: DeltaRule | None = None
    recurrent: tuple[bool, ...] = ()
    """Which layers are a gated delta rule; empty: none."""

    @property
    def attending(self) -> int:
        """Return layers of attention."""
        return self.layers - sum(self.recurrent)

    @property
    def decoder(self) -> Decoder:
        """Return what its model type says of its layers."""
        decoder = FAMILIES[self.model_type].decoder
        assert decoder is not None, "others are not planned"
        return decoder

    @property
    def query(self) -> int:
        """Return the width of all query heads."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Return the width of all key heads, and that of all value heads."""
        return self.kv_heads * self.head_dim

    def layer(self, number: int) -> list[Weight]:
        """Return weights of a decoder layer, in the order of the module."""
        mlp = self._experts() if self.sparse[number] else self._mlp("mlp", self.intermediate, bias=self.mlp_bias)
        mixer = self._delta_rule() if self.recurrent and self.recurrent[number] else self._attention()
        return [*mixer, *mlp, *(Weight(f"{name}.weight", (self.hidden,)) for name in self.decoder.norms)]

    @property
    def embedding(self) -> Weight:
        """Return the embedding of the tokens."""
        return Weight("embed_tokens.weight", (self.vocab, self.hidden))

    @property
    def final_norm(self) -> Weight:
        """Return the norm behind the last layer."""
        return Weight("norm.weight", (self.hidden,))

    def head(self, kind: str) -> list[Weight]:
        """Return the head of a `policy` (none if tied), or the scalar one of a `value` or `reward` model."""
        if kind == "policy":
            return [] if self.tied else [Weight("lm_head.weight", (self.vocab, self.hidden))]
        return [Weight("value_head.weight" if kind == "value" else "score.weight", (1, self.hidden))]

    def parameters(self, kind: str = "policy") -> Iterator[Weight]:
        """Yield all weights of a model of this kind, in the order of the module."""
        yield self.embedding
        for number in range(self.layers):
            yield from self.layer(number)
        yield self.final_norm
        yield from self.head(kind)

    def count(self, kind: str = "policy") -> int:
        """Return numbers in all weights."""
        return sum(weight.size for weight in self.parameters(kind))

    # --- pieces ----------------------------------------------------------------------------------------------------

    def _attention(self) -> Iterator[Weight]:
        hidden, decoder = self.hidden, self.decoder
        if decoder.fused:
            yield Weight("self_attn.o_proj.weight", (hidden, self.query), linear=True)
            yield Weight("self_attn.qkv_proj.weight", (self.query + 2 * self.key, hidden), linear=True)
            return
        queries = self.query * (2 if decoder.delta_rule is not None else 1)  # with their gates
        for name, width in (("q", queries), ("k", self.key), ("v", self.key)):
            yield Weight(f"self_attn.{name}_proj.weight", (width, hidden), linear=True)
            if self.qkv_bias:
                yield Weight(f"self_attn.{name}_proj.bias", (width,))
        yield Weight("self_attn.o_proj.weight", (hidden, self.query), linear=True)
        if self.other_bias:
            yield Weight("self_attn.o_proj.bias", (hidden,))
        if decoder.qk_norm is not None:
            widths = (self.head_dim,) * 2 if decoder.qk_norm == "head" else (self.query, self.key)
            for name, width in zip("qk", widths, strict=True):
                yield Weight(f"self_attn.{name}_norm.weight", (width,))

    def _delta_rule(self) -> Iterator[Weight]:
        rule, hidden = self.delta_rule, self.hidden
        assert rule is not None, "layers of attention alone have none"
        yield Weight("linear_attn.dt_bias", (rule.value_heads,))
        yield Weight("linear_attn.A_log", (rule.value_heads,))
        yield Weight("linear_attn.conv1d.weight", (rule.convolved, 1, rule.kernel))
        norm = Weight("linear_attn.norm.weight", (rule.value_head_dim,))
        out = Weight("linear_attn.out_proj.weight", (hidden, rule.value), linear=True)
        if self.decoder.delta_rule == "fused":
            for name, width in (("qkvz", rule.convolved + rule.value), ("ba", 2 * rule.value_heads)):
                yield Weight(f"linear_attn.in_proj_{name}.weight", (width, hidden), linear=True)
            yield from (norm, out)
            return
        yield from (norm, out)
        widths = {"qkv": rule.convolved, "z": rule.value, "b": rule.value_heads, "a": rule.value_heads}
        for name, width in widths.items():
            yield Weight(f"linear_attn.in_proj_{name}.weight", (width, hidden), linear=True)

    def _mlp(self, prefix: str, width: int, *, bias: bool = False) -> Iterator[Weight]:
        if self.decoder.fused:
            yield Weight(f"{prefix}.gate_up_proj.weight", (2 * width, self.hidden), linear=True)
            yield Weight(f"{prefix}.down_proj.weight", (self.hidden, width), linear=True)
            return
        for name, shape in (
            ("gate", (width, self.hidden)),
            ("up", (width, self.hidden)),
            ("down", (self.hidden, width)),
        ):
            yield Weight(f"{prefix}.{name}_proj.weight", shape, linear=True)
            if bias:
                yield Weight(f"{prefix}.{name}_proj.bias", shape[:1])

    def _experts(self) -> Iterator[Weight]:
        """Yield stacked experts, two tensors of them; the router isn't a linear layer of transformers."""
        router = Weight("mlp.gate.weight", (self.experts, self.hidden))
        experts = FAMILIES[self.model_type].experts
        assert experts is not None, "layers without are not sparse"
        if not experts.router_last:
            yield router
        yield Weight("mlp.experts.gate_up_proj", (self.experts, 2 * self.expert_width, self.hidden))
        yield Weight("mlp.experts.down_proj", (self.experts, self.hidden, self.expert_width))
        if experts.router_last:
            yield router
        if self.shared_width:
            yield from self._mlp("mlp.shared_expert", self.shared_width)
            yield Weight("mlp.shared_expert_gate.weight", (1, self.hidden), linear=True)


class UnknownModel(ValueError):
    """A model whose memory can't be told from what is there."""


def read_architecture(name: str, overrides: Mapping[str, Any], key: str) -> Architecture:
    """Return the architecture of a model folder, of a hub model in the hub's cache, or of a well-known one.

    Args:
        name: folder or hub id.
        overrides: the user's `model_config_kwargs`.
        key: who names the model, for messages.

    Raises:
        UnknownModel: no config.json, or one of a family that isn't known.
    """
    file = config_file(name)
    if file is None and (known := known_sizes(name)) is not None:
        return architecture_of({**known, **overrides}, name, key)
    if file is None:
        fix = f"Name a model folder, or fetch that file of a hub model: hf download {name} config.json"
        if name.startswith(("/", ".", "~")) or name.count("/") > 1:
            fix = f"If that folder is still to be made, plan with the model it comes from: {key}=ORG/NAME"
        raise UnknownModel(
            f"{key}: {name!r} has no config.json here, and without it nothing is known about its memory. {fix}"
        )
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnknownModel(f"{key}: {file} isn't JSON ({error}); write the model's own config.json again") from None
    if not isinstance(tree, dict):
        raise UnknownModel(f"{key}: {file} holds no mapping; write the model's own config.json again")
    if isinstance(tree.get("text_config"), dict) and "vision_config" in tree:
        raise UnknownModel(f"{key}: {name} reads images, and vision towers aren't planned; plan its language model")
    return architecture_of({**tree, **overrides}, str(file), key)


def architecture_of(tree: Mapping[str, Any], file: str, key: str) -> Architecture:
    """Return the architecture that a configuration describes; raise `UnknownModel` where it doesn't say enough."""
    model_type = tree.get("model_type")
    family = family_of(model_type)
    decoder, experts = family.decoder, family.experts
    if decoder is None:
        known = ", ".join(name for name, family in FAMILIES.items() if family.decoder is not None)
        raise UnknownModel(
            f"{key}: {file} is of model_type {model_type!r}, whose weights aren't planned; known: {known}. The run "
            "itself may well work: watch the memory of its first step"
        )
    tree = {**decoder.defaults, **tree}

    def number(*names: str) -> int:
        for name in names:
            value = tree.get(name)
            if type(value) is int and value >= 0:
                return value
        raise UnknownModel(f"{key}: {file} has no {names[0]}; expected a whole number")

    def flag(named: bool | str) -> bool:
        return bool(tree.get(named)) if isinstance(named, str) else named

    heads, hidden, layers = number("num_attention_heads"), number("hidden_size"), number("num_hidden_layers")
    if not heads or not layers:
        raise UnknownModel(f"{key}: {file} has num_attention_heads {heads} and num_hidden_layers {layers}: no decoder")
    sparse = _sparse(tree, experts, layers)
    kv_heads = tree.get("num_key_value_heads")
    head_dim = tree.get("head_dim")
    return Architecture(
        model_type=str(model_type),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads if type(kv_heads) is int else heads,
        head_dim=head_dim if type(head_dim) is int else hidden // heads,
        intermediate=0 if all(sparse) and "intermediate_size" not in tree else number("intermediate_size"),
        vocab=number("vocab_size"),
        tied=bool(tree.get("tie_word_embeddings", False)),
        qkv_bias=flag(decoder.qkv_bias),
        other_bias=flag(decoder.output_bias),
        mlp_bias=flag(decoder.mlp_bias),
        experts=number(*experts.count) if experts and any(sparse) else 0,
        expert_width=number(experts.width) if experts and any(sparse) else 0,
        experts_per_token=number("num_experts_per_tok") if any(sparse) else 0,
        shared_width=number(experts.shared_width) if experts and any(sparse) and experts.shared_width else 0,
        sparse=sparse,
        positions=tree.get("max_position_embeddings"),
        delta_rule=DeltaRule(
            key=number("linear_num_key_heads") * number("linear_key_head_dim"),
            value_heads=number("linear_num_value_heads"),
            value_head_dim=number("linear_value_head_dim"),
            key_head_dim=number("linear_key_head_dim"),
            kernel=number("linear_conv_kernel_dim"),
        )
        if decoder.delta_rule is not None
        else None,
        recurrent=recurrent_layers(tree, layers) if decoder.delta_rule is not None else (),
    )


def recurrent_layers(tree: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Return which layers are no attention: by their types, or all but each `full_attention_interval`th."""
    kinds, interval = tree.get("layer_types"), tree.get("full_attention_interval", 4)
    if isinstance(kinds, list):
        return tuple(kind == "linear_attention" for kind in kinds[:layers])
    return tuple(bool((layer + 1) % interval) for layer in range(layers))


def _sparse(tree: Mapping[str, Any], experts: Experts | None, layers: int) -> tuple[bool, ...]:
    """Return which layers have experts."""
    if experts is None or experts.every_layer:
        return (experts is not None,) * layers
    step, dense = tree.get("decoder_sparse_step", 1) or 1, tree.get("mlp_only_layers") or ()
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
