"""Tiny real models and a tokenizer of characters, made on the spot: no network, no data from outside."""

from __future__ import annotations

import string
from pathlib import Path

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def char_tokenizer():
    """One token per character, with ChatML."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(set(string.printable))
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(special + letters)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHATML
    return fast


def build_tiny_model(
    folder: Path, family: str = "llama", *, hidden: int = 32, layers: int = 2, seed: int = 0, **options: object
) -> Path:
    """A random model of a few thousand parameters, saved with the character tokenizer.

    `family` is a transformers model type: llama, qwen2, qwen3, mistral, or one of `_SHAPES`; `options` are changes of
    its configuration.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = char_tokenizer()
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 256,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": True,
        **_SHAPES.get(family, {}),
        **options,
    }
    config = AutoConfig.for_model(family, **shape)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def build_tiny_picture_model(folder: Path, family: str = "qwen3_5", *, seed: int = 0, **options: object) -> Path:
    """A random model of pictures and text, saved with the character tokenizer and a processor's file.

    `options` are changes of the configuration of its language model; with `tie_word_embeddings` its head is tied.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    tokenizer = char_tokenizer()
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        **{f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")},
        **_SHAPES.get(f"{family}_text", {}),
        **options,
    }
    tied = bool(text.pop("tie_word_embeddings", False))
    tower = {**_TOWERS[family], "out_hidden_size": text["hidden_size"]}
    config = AutoConfig.for_model(family, text_config=text, vision_config=tower, tie_word_embeddings=tied)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"size": {"shortest_edge": 56}}')
    return folder


_QWEN_TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
_TOWERS = {
    "qwen3_5": _QWEN_TOWER,
    "qwen3_5_moe": _QWEN_TOWER,
    "gemma3": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
}

_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "num_hidden_layers": 3,
}
_QWEN_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}

HYBRIDS = {
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": {**_LINEAR, **_QWEN_EXPERTS},
    "qwen3_next": {**_LINEAR, **_QWEN_EXPERTS},
    "granitemoehybrid": {
        **_MAMBA,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_hidden_layers": 3,
    },
    # Attention and a state-space layer side by side in every layer.
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    # Convolutions alone.
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
}

_SHAPES = {
    **HYBRIDS,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": _QWEN_EXPERTS,
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    # The first layer dense, the second with shared experts beside the routed ones.
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 16,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 16,
    },
}
