"""What config.json of models that many people train says about their sizes: `roll plan` needs no download for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

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
    found = _SIZES.get(re.sub(r"-(Instruct|Base)(-\d{4})?$", "", name))
    if found is None:
        return None
    model_type, sizes, more = found
    return {"model_type": model_type, **dict(zip(_KEYS, sizes, strict=True)), **more}
