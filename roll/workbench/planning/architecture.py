"""A decoder's weights by name and shape, from its config.json: what transformers will build."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from roll.configs.catalog.family_table import FAMILIES, Decoder, Experts, family_of
from roll.configs.schema.model_shape import config_file
from roll.workbench.planning.recurrent import DeltaRule, StateSpace, Weight, recurrent_layers


def known_sizes(name: str) -> dict[str, Any] | None:
    """Return the entries of config.json that sizes follow from, of a hub id, also of its -Instruct or -Base form."""
    pretrained = re.sub(r"-(Instruct|Base)(-\d{4})?$", "", name)
    for model_type, family in FAMILIES.items():
        if pretrained in family.models:
            return {"model_type": model_type, **family.models[pretrained]}
    return None


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
    mixer: DeltaRule | StateSpace | None = None
    """What recurrent layers have in place of attention."""
    recurrent: tuple[bool, ...] = ()
    """Which layers are recurrent; empty: none."""
    tower: bool = False
    """Its folder has a tower for pictures, which isn't loaded and isn't counted."""

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
        recurrent = self.mixer is not None and self.recurrent[number]
        mixer = self.mixer.weights(self.hidden) if self.mixer is not None and recurrent else self._attention()
        norms = [Weight(f"{name}.weight", (self.hidden,)) for name in self.decoder.norms]
        if self.decoder.state_space:
            return [*norms, *self._granite_mlp(sparse=self.sparse[number]), *mixer]
        mlp = self._experts() if self.sparse[number] else self._mlp("mlp", self.intermediate, bias=self.mlp_bias)
        return [*mixer, *mlp, *norms]

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

    def _granite_mlp(self, *, sparse: bool) -> Iterator[Weight]:
        """Yield stacked experts, if there are some, and the MLP that every token passes, gate and up in one matrix."""
        if sparse:
            yield Weight("block_sparse_moe.router.weight", (self.experts, self.hidden))
            yield Weight("block_sparse_moe.experts.gate_up_proj", (self.experts, 2 * self.expert_width, self.hidden))
            yield Weight("block_sparse_moe.experts.down_proj", (self.experts, self.hidden, self.expert_width))
        width = self.shared_width or self.intermediate
        yield Weight("shared_mlp.input_linear.weight", (2 * width, self.hidden), linear=True)
        yield Weight("shared_mlp.output_linear.weight", (self.hidden, width), linear=True)


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
        if not family_of(tree.get("model_type")).trained_as_text:
            raise UnknownModel(f"{key}: {name} reads images, and vision towers aren't planned; plan its language model")
        text = {**tree["text_config"], "tie_word_embeddings": tree.get("tie_word_embeddings", False)}
        return replace(architecture_of({**text, **overrides}, str(file), key), tower=True)
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
    dense_width = "intermediate_size"
    if decoder.state_space and not number(*experts.count if experts else ()):
        experts, dense_width = None, "shared_intermediate_size"  # all that is left of its MLPs
    sparse = _sparse(tree, experts, layers)
    kv_heads = tree.get("num_key_value_heads")
    head_dim = tree.get("head_dim")
    mixer: DeltaRule | StateSpace | None = None
    if decoder.delta_rule is not None:
        mixer = DeltaRule.read(number, decoder.delta_rule)
    elif decoder.state_space:
        mixer = StateSpace.read(number, tree, hidden)
    return Architecture(
        model_type=str(model_type),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads if type(kv_heads) is int else heads,
        head_dim=head_dim if type(head_dim) is int else hidden // heads,
        intermediate=0 if all(sparse) and dense_width not in tree else number(dense_width),
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
        mixer=mixer,
        recurrent=recurrent_layers(tree, layers, mixer) if mixer is not None else (),
    )


def _sparse(tree: Mapping[str, Any], experts: Experts | None, layers: int) -> tuple[bool, ...]:
    """Return which layers have experts."""
    if experts is None or experts.every_layer:
        return (experts is not None,) * layers
    step, dense = tree.get("decoder_sparse_step", 1) or 1, tree.get("mlp_only_layers") or ()
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
