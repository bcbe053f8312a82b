"""A decoder's weights by name and shape, from its config.json: what transformers will build."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from roll.configs.schema.model_shape import config_file
from roll.workbench.planning.families import FAMILIES, Family

_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "tie_word_embeddings",
)  # fmt: skip
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}

_SIZES: dict[str, tuple[str, tuple[Any, ...], Mapping[str, Any]]] = {
    "Qwen/Qwen2.5-0.5B": ("qwen2", (896, 4864, 24, 14, 2, 64, 151936, True), {}),
    "Qwen/Qwen2.5-1.5B": ("qwen2", (1536, 8960, 28, 12, 2, 128, 151936, True), {}),
    "Qwen/Qwen2.5-3B": ("qwen2", (2048, 11008, 36, 16, 2, 128, 151936, True), {}),
    "Qwen/Qwen2.5-7B": ("qwen2", (3584, 18944, 28, 28, 4, 128, 152064, False), {}),
    "Qwen/Qwen2.5-14B": ("qwen2", (5120, 13824, 48, 40, 8, 128, 152064, False), {}),
    "Qwen/Qwen2.5-32B": ("qwen2", (5120, 27648, 64, 40, 8, 128, 152064, False), {}),
    "Qwen/Qwen2.5-72B": ("qwen2", (8192, 29568, 80, 64, 8, 128, 152064, False), {}),
    "Qwen/Qwen3-0.6B": ("qwen3", (1024, 3072, 28, 16, 8, 128, 151936, True), {}),
    "Qwen/Qwen3-1.7B": ("qwen3", (2048, 6144, 28, 16, 8, 128, 151936, True), {}),
    "Qwen/Qwen3-4B": ("qwen3", (2560, 9728, 36, 32, 8, 128, 151936, True), {}),
    "Qwen/Qwen3-8B": ("qwen3", (4096, 12288, 36, 32, 8, 128, 151936, False), {}),
    "Qwen/Qwen3-14B": ("qwen3", (5120, 17408, 40, 40, 8, 128, 151936, False), {}),
    "Qwen/Qwen3-32B": ("qwen3", (5120, 25600, 64, 64, 8, 128, 151936, False), {}),
    "Qwen/Qwen3-30B-A3B": (
        "qwen3_moe", (2048, 6144, 48, 32, 4, 128, 151936, False), {**_EXPERTS, "moe_intermediate_size": 768}
    ),
    "Qwen/Qwen3-235B-A22B": (
        "qwen3_moe", (4096, 12288, 94, 64, 4, 128, 151936, False), {**_EXPERTS, "moe_intermediate_size": 1536}
    ),
    "meta-llama/Llama-3.2-1B": ("llama", (2048, 8192, 16, 32, 8, 64, 128256, True), {}),
    "meta-llama/Llama-3.2-3B": ("llama", (3072, 8192, 28, 24, 8, 128, 128256, True), {}),
    "meta-llama/Llama-3.1-8B": ("llama", (4096, 14336, 32, 32, 8, 128, 128256, False), {}),
    "meta-llama/Llama-3.1-70B": ("llama", (8192, 28672, 80, 64, 8, 128, 128256, False), {}),
    "meta-llama/Llama-3.3-70B": ("llama", (8192, 28672, 80, 64, 8, 128, 128256, False), {}),
    "HuggingFaceTB/SmolLM2-135M": ("llama", (576, 1536, 30, 9, 3, 64, 49152, True), {}),
    "HuggingFaceTB/SmolLM2-360M": ("llama", (960, 2560, 32, 15, 5, 64, 49152, True), {}),
    "HuggingFaceTB/SmolLM2-1.7B": ("llama", (2048, 8192, 24, 32, 32, 64, 49152, True), {}),
}  # fmt: skip


def known_sizes(name: str) -> dict[str, Any] | None:
    """Return the entries of config.json that sizes follow from, of a hub id, also of its -Instruct or -Base form."""
    sizes_of_name = _SIZES.get(re.sub(r"-(Instruct|Base)(-\d{4})?$", "", name))
    if sizes_of_name is None:
        return None
    model_type, sizes, more = sizes_of_name
    return {"model_type": model_type, **dict(zip(_KEYS, sizes, strict=True)), **more}


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
class Architecture:
    """A decoder of attention and gated MLPs, dense or with experts."""

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

    @property
    def family(self) -> Family:
        """Return what its model type says."""
        return FAMILIES[self.model_type]

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
        return [*self._attention(), *mlp, *(Weight(f"{name}.weight", (self.hidden,)) for name in self.family.norms)]

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
        hidden, family = self.hidden, self.family
        if family.fused:
            yield Weight("self_attn.o_proj.weight", (hidden, self.query), linear=True)
            yield Weight("self_attn.qkv_proj.weight", (self.query + 2 * self.key, hidden), linear=True)
            return
        for name, width in (("q", self.query), ("k", self.key), ("v", self.key)):
            yield Weight(f"self_attn.{name}_proj.weight", (width, hidden), linear=True)
            if self.qkv_bias:
                yield Weight(f"self_attn.{name}_proj.bias", (width,))
        yield Weight("self_attn.o_proj.weight", (hidden, self.query), linear=True)
        if self.other_bias:
            yield Weight("self_attn.o_proj.bias", (hidden,))
        if family.qk_norm is not None:
            widths = (self.head_dim,) * 2 if family.qk_norm == "head" else (self.query, self.key)
            for name, width in zip("qk", widths, strict=True):
                yield Weight(f"self_attn.{name}_norm.weight", (width,))

    def _mlp(self, prefix: str, width: int, *, bias: bool = False) -> Iterator[Weight]:
        if self.family.fused:
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
        if not self.family.router_last:
            yield router
        yield Weight("mlp.experts.gate_up_proj", (self.experts, 2 * self.expert_width, self.hidden))
        yield Weight("mlp.experts.down_proj", (self.experts, self.hidden, self.expert_width))
        if self.family.router_last:
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
    family = FAMILIES.get(str(model_type))
    if family is None:
        known = ", ".join(FAMILIES)
        raise UnknownModel(
            f"{key}: {file} is of model_type {model_type!r}, whose weights aren't planned; known: {known}. The run "
            "itself may well work: watch the memory of its first step"
        )
    tree = {**family.defaults, **tree}

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
    sparse = _sparse(tree, family, layers)
    kv_heads = tree.get("num_key_value_heads")
    head_dim = tree.get("head_dim")
    return Architecture(
        model_type=str(model_type),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads if type(kv_heads) is int else heads,
        head_dim=head_dim if type(head_dim) is int else hidden // heads,
        intermediate=number("intermediate_size"),
        vocab=number("vocab_size"),
        tied=bool(tree.get("tie_word_embeddings", False)),
        qkv_bias=flag(family.qkv_bias),
        other_bias=flag(family.output_bias),
        mlp_bias=flag(family.mlp_bias),
        experts=number(*family.experts) if any(sparse) else 0,
        expert_width=number(family.expert_width) if any(sparse) else 0,
        experts_per_token=number("num_experts_per_tok") if any(sparse) else 0,
        shared_width=number(family.shared_width) if any(sparse) and family.shared_width else 0,
        sparse=sparse,
        positions=tree.get("max_position_embeddings"),
    )


def _sparse(tree: Mapping[str, Any], family: Family, layers: int) -> tuple[bool, ...]:
    """Return which layers have experts."""
    if not family.experts:
        return (False,) * layers
    step, dense = tree.get("decoder_sparse_step", 1) or 1, tree.get("mlp_only_layers") or ()
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
