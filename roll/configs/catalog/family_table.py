"""Model families: what planning, backends and engines must know of a `model_type` of transformers.

A family that isn't here is computed by transformers and compared with it at the start, like all others; it isn't
planned, Megatron doesn't build it, and no kernel or loader treats it in a way of its own. What every config.json states
itself (context length, types of layers, factors of logits, rotations) is read there and in no record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

_PRE = ("input_layernorm", "post_attention_layernorm")
_SANDWICH = (*_PRE, "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Layers of attention and gated MLPs, as they follow from a config.json."""

    norms: tuple[str, ...] = _PRE
    """Norms of a layer besides those of its queries and keys."""
    qk_norm: Literal["head", "all"] | None = None
    """Norms of queries and keys: of each head, or of all together."""
    qkv_bias: bool | str = False
    """A fixed answer, or the field that has it."""
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    fused: bool = False
    """One matrix for queries, keys and values, one for gate and up."""
    window: Literal["layer_types", "sliding_window"] | None = None
    """layer_types: each layer says whether its window slides; sliding_window: all of them do if it is set."""
    delta_rule: Literal["fused", "apart"] | None = None
    """Layers of type `linear_attention` are a gated delta rule behind a short convolution, its input projections fused
    into two or apart; attention beside them has gates, for which its queries' projection is twice as wide."""
    state_space: bool = False
    """Layers of type `linear_attention`, or `mamba`, are state-space layers (Mamba-2), behind the MLP in the module;
    beside its experts every token passes an MLP."""
    softcap: bool = False
    """Logits are soft-capped, which makes a float32 copy of them."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What transformers assumes where config.json doesn't say."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """MLPs of which a router chooses some for each token."""

    count: tuple[str, ...] = ("num_experts", "num_local_experts")
    """Fields with the number of experts: that of transformers, and another that files have."""
    width: str = "moe_intermediate_size"
    shared_width: str | None = None
    """Field with the width of a gated expert that every token passes."""
    every_layer: bool = False
    """Else `decoder_sparse_step` and `mlp_only_layers` say which layers have them."""
    normalised: str | None = None
    """Field that says whether the chosen experts' weights are normalised; None: they are."""
    router_last: bool = False
    """The module has the router's weight after those of the experts."""
    folder_in_files: str = "mlp"
    """What checkpoints call the `mlp` of the module."""
    parts_in_files: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's matrices in checkpoints, which keep apart what the module has stacked."""


@dataclass(frozen=True, kw_only=True)
class PictureTower:
    """The part of a model that reads pictures, by names of its transformers module.

    Tokens of pictures have positions in three dimensions (mrope), and the image processor is Qwen2-VL's.
    """

    tower: str = "model.visual."
    """Beginning of the names of its parameters."""
    projector: tuple[str, ...] = ("model.visual.merger.",)
    """Beginnings of those that make features of the language model's width of what the tower has computed."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is known of one model type. Mathematics that differs is code of the backend and named by its path."""

    decoder: Decoder | None = None
    """None: its weights aren't planned."""
    experts: Experts | None = None
    tested: bool = False
    """`hf_infer` and the trainers run it in the project's own tests; of other types `roll check` builds the module."""
    trained_as_text: bool = False
    """It has a tower for pictures or sound, and trains on text: its language model is loaded by itself where
    transformers has a class of it (roll/strategies/training/picture_folder.py)."""
    pictures: PictureTower | None = None
    """The trainers that run transformers' modules give it pictures. None: it is given none."""
    megatron: bool = False
    """Megatron can build all that `decoder` and `experts` say."""
    decode_step: str | None = None
    """Class of `hf_infer` that computes its decode steps without its modules."""
    liger: Literal["norms", "norms and MLPs"] | None = None
    """Kernels of liger-kernel that gave transformers' numbers."""
    multiplies_logits: bool = False
    """Its logits are multiplied by `logits_scaling`, by which others divide them."""
    sglang_ties_head: bool = True
    """SGLang computes its head from the embeddings where config.json ties them."""
    vllm_copying_loader: str | None = None
    """Its class in vLLM 0.32, if that loads by copying into parameters, which a weight update leaves without memory."""
    vllm_imports: str | None = None
    """A package that vLLM's module imports besides what vLLM comes with on a CPU."""
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Hub id -> the entries of config.json that sizes follow from, of models that are planned without a download."""

    @property
    def megatron_lacks(self) -> str:
        """Return what more than a record it would take on Megatron; empty where that isn't known."""
        if self.decoder is None or self.decoder.delta_rule is None:
            return ""
        return (
            "Megatron-core has layers of gated delta rule only with the kernels of flash-linear-attention, which need "
            "an accelerator, and here is no map of their weights"
        )


def _sizes(
    hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int, *, tied: bool, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        **more,
    }


_OF_128 = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
_LLAMAS = {
    "meta-llama/Llama-3.2-1B": _sizes(2048, 8192, 16, 32, 8, 64, 128256, tied=True),
    "meta-llama/Llama-3.2-3B": _sizes(3072, 8192, 28, 24, 8, 128, 128256, tied=True),
    "meta-llama/Llama-3.1-8B": _sizes(4096, 14336, 32, 32, 8, 128, 128256, tied=False),
    "meta-llama/Llama-3.1-70B": _sizes(8192, 28672, 80, 64, 8, 128, 128256, tied=False),
    "meta-llama/Llama-3.3-70B": _sizes(8192, 28672, 80, 64, 8, 128, 128256, tied=False),
    "HuggingFaceTB/SmolLM2-135M": _sizes(576, 1536, 30, 9, 3, 64, 49152, tied=True),
    "HuggingFaceTB/SmolLM2-360M": _sizes(960, 2560, 32, 15, 5, 64, 49152, tied=True),
    "HuggingFaceTB/SmolLM2-1.7B": _sizes(2048, 8192, 24, 32, 32, 64, 49152, tied=True),
}
_QWEN2S = {
    "Qwen/Qwen2.5-0.5B": _sizes(896, 4864, 24, 14, 2, 64, 151936, tied=True),
    "Qwen/Qwen2.5-1.5B": _sizes(1536, 8960, 28, 12, 2, 128, 151936, tied=True),
    "Qwen/Qwen2.5-3B": _sizes(2048, 11008, 36, 16, 2, 128, 151936, tied=True),
    "Qwen/Qwen2.5-7B": _sizes(3584, 18944, 28, 28, 4, 128, 152064, tied=False),
    "Qwen/Qwen2.5-14B": _sizes(5120, 13824, 48, 40, 8, 128, 152064, tied=False),
    "Qwen/Qwen2.5-32B": _sizes(5120, 27648, 64, 40, 8, 128, 152064, tied=False),
    "Qwen/Qwen2.5-72B": _sizes(8192, 29568, 80, 64, 8, 128, 152064, tied=False),
}
_QWEN3S = {
    "Qwen/Qwen3-0.6B": _sizes(1024, 3072, 28, 16, 8, 128, 151936, tied=True),
    "Qwen/Qwen3-1.7B": _sizes(2048, 6144, 28, 16, 8, 128, 151936, tied=True),
    "Qwen/Qwen3-4B": _sizes(2560, 9728, 36, 32, 8, 128, 151936, tied=True),
    "Qwen/Qwen3-8B": _sizes(4096, 12288, 36, 32, 8, 128, 151936, tied=False),
    "Qwen/Qwen3-14B": _sizes(5120, 17408, 40, 40, 8, 128, 151936, tied=False),
    "Qwen/Qwen3-32B": _sizes(5120, 25600, 64, 64, 8, 128, 151936, tied=False),
}
_QWEN3_MOES = {
    "Qwen/Qwen3-30B-A3B": _sizes(2048, 6144, 48, 32, 4, 128, 151936, tied=False, **_OF_128, moe_intermediate_size=768),
    "Qwen/Qwen3-235B-A22B": _sizes(
        4096, 12288, 94, 64, 4, 128, 151936, tied=False, **_OF_128, moe_intermediate_size=1536
    ),
}


def _with_biases(**more: Any) -> Decoder:
    """Return a decoder whose configuration says whether its attention has biases."""
    return Decoder(qkv_bias="attention_bias", output_bias="attention_bias", **more)


_TIED = {"tie_word_embeddings": True}
_QWEN_HYBRID = {
    "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
_GRANITE_HYBRID = {
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_chunk_size": 256, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024,
}  # fmt: skip
_GEMMA = {**_TIED, "head_dim": 256}
_LLAMA_STEP = "roll.strategies.engines.hf.decode_step:DecodeStep"
_LIKE_LLAMA: dict[str, Any] = {
    "tested": True, "megatron": True, "decode_step": _LLAMA_STEP, "liger": "norms and MLPs",
}  # fmt: skip

_DEEP_TOWER = PictureTower(projector=("model.visual.merger.", "model.visual.deepstack_merger_list."))

FAMILIES: dict[str, Family] = {
    "llama": Family(decoder=_with_biases(mlp_bias="mlp_bias"), models=_LLAMAS, **_LIKE_LLAMA),
    "qwen2": Family(decoder=Decoder(qkv_bias=True, window="layer_types"), models=_QWEN2S, **_LIKE_LLAMA),
    "qwen3": Family(
        decoder=_with_biases(qk_norm="head", window="layer_types", defaults={"head_dim": 128}),
        models=_QWEN3S,
        **_LIKE_LLAMA,
    ),
    "mistral": Family(decoder=Decoder(window="sliding_window"), **_LIKE_LLAMA),
    "mixtral": Family(
        decoder=Decoder(window="sliding_window"),
        experts=Experts(
            count=("num_local_experts", "num_experts"),
            width="intermediate_size",
            every_layer=True,
            folder_in_files="block_sparse_moe",
            parts_in_files=("w1", "w3", "w2"),
        ),
        tested=True,
        megatron=True,
        liger="norms",
        sglang_ties_head=False,
    ),
    "qwen2_moe": Family(
        decoder=Decoder(qkv_bias="qkv_bias", window="layer_types", defaults={"qkv_bias": True}),
        experts=Experts(shared_width="shared_expert_intermediate_size", normalised="norm_topk_prob"),
        tested=True,
        megatron=True,
        sglang_ties_head=False,
    ),
    "qwen3_moe": Family(
        decoder=_with_biases(qk_norm="head", window="sliding_window"),
        experts=Experts(normalised="norm_topk_prob", router_last=True),
        tested=True,
        megatron=True,
        liger="norms",
        sglang_ties_head=False,
        models=_QWEN3_MOES,
    ),
    "qwen3_5_text": Family(
        decoder=_with_biases(qk_norm="head", window="layer_types", delta_rule="apart", defaults=_QWEN_HYBRID),
        tested=True,
        vllm_imports="torchvision",
    ),
    "qwen3_5_moe_text": Family(
        decoder=_with_biases(qk_norm="head", window="layer_types", delta_rule="apart", defaults=_QWEN_HYBRID),
        experts=Experts(shared_width="shared_expert_intermediate_size", every_layer=True),
        tested=True,
        vllm_imports="torchvision",
    ),
    "qwen3_next": Family(
        decoder=_with_biases(qk_norm="head", window="layer_types", delta_rule="fused", defaults=_QWEN_HYBRID),
        experts=Experts(shared_width="shared_expert_intermediate_size", normalised="norm_topk_prob"),
        tested=True,
    ),
    "granitemoehybrid": Family(
        decoder=_with_biases(window="layer_types", state_space=True, defaults=_GRANITE_HYBRID),
        experts=Experts(
            count=("num_local_experts",),
            width="intermediate_size",
            shared_width="shared_intermediate_size",
            every_layer=True,
        ),
        tested=True,
    ),
    "gemma": Family(decoder=_with_biases(defaults=_GEMMA)),
    "gemma2": Family(
        decoder=_with_biases(norms=_SANDWICH, window="layer_types", softcap=True, defaults=_GEMMA), tested=True
    ),
    "gemma3_text": Family(
        decoder=_with_biases(norms=_SANDWICH, qk_norm="head", window="layer_types", defaults=_GEMMA), tested=True
    ),
    "phi3": Family(decoder=Decoder(fused=True, window="sliding_window"), tested=True),
    "granite": Family(decoder=_with_biases(mlp_bias="mlp_bias"), tested=True),
    "olmo2": Family(decoder=_with_biases(norms=_SANDWICH[1::2], qk_norm="all")),
    "smollm3": Family(decoder=_with_biases(mlp_bias="mlp_bias", window="layer_types", defaults=_TIED)),
    "cohere": Family(tested=True),
    "gpt2": Family(tested=True),
    "gpt_neox": Family(tested=True),
    "gpt_oss": Family(tested=True, vllm_copying_loader="GptOssForCausalLM"),
    "opt": Family(tested=True),
    "hyperclovax": Family(multiplies_logits=True),
    "gemma3": Family(trained_as_text=True),
    "gemma3n": Family(trained_as_text=True),
    "gemma4": Family(trained_as_text=True),
    "gemma4_unified": Family(trained_as_text=True),
    "phi4_multimodal": Family(trained_as_text=True),
    "qwen3_5": Family(trained_as_text=True),
    "qwen3_5_moe": Family(trained_as_text=True),
    "qwen4_exp": Family(trained_as_text=True),
    "qwen2_vl": Family(pictures=PictureTower()),
    "qwen2_5_vl": Family(pictures=PictureTower()),
    "qwen3_vl": Family(pictures=_DEEP_TOWER),
    "qwen3_vl_moe": Family(pictures=_DEEP_TOWER),
}
"""By `model_type`. Messages name families in this order."""

_UNKNOWN = Family()


def family_of(model_type: object) -> Family:
    """Return what is known of a model type: of one that isn't in the table, nothing."""
    return FAMILIES.get(model_type, _UNKNOWN) if isinstance(model_type, str) else _UNKNOWN
