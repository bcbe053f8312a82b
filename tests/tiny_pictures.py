"""Tiny random models that read pictures, with a tokenizer of characters and an image processor, made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_models import char_tokenizer

PLACE, START, END, VIDEO = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"

PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}" + START + PLACE + END + "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Chat template of messages whose contents are text or parts."""

_TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
}  # fmt: skip
_INTERLEAVED = {**_TEXT, "rope_parameters": {**_TEXT["rope_parameters"], "mrope_interleaved": True}}  # type: ignore[dict-item]
_QWEN3_TOWER = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 16,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1,
    "norm_topk_prob": True, "mlp_only_layers": [],
}  # fmt: skip

PICTURE_FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (_TEXT, {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}),
    "qwen2_5_vl": (
        _TEXT,
        {"depth": 2, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 48,
         "fullatt_block_indexes": [1], "window_size": 56},
    ),
    "qwen3_vl": (_INTERLEAVED, _QWEN3_TOWER),
    "qwen3_vl_moe": ({**_INTERLEAVED, **_EXPERTS}, _QWEN3_TOWER),
}  # fmt: skip
"""Model type -> (sizes of its language model, of its tower)."""


def picture_tokenizer() -> Any:
    """One token per character, with ChatML and the tokens around pictures."""
    tokenizer = char_tokenizer()
    special = ["<|im_start|>", "<|im_end|>", START, END, PLACE, VIDEO]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = PARTS
    return tokenizer


def build_tiny_picture_model(folder: Path, family: str = "qwen2_vl", *, seed: int = 0, **text: object) -> Path:
    """A random model of some 100,000 parameters, saved with its tokenizer and image processor (Pillow).

    `text` are changes of its language model's configuration.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = picture_tokenizer()
    ids = dict(zip(("image", "video", "vision_start", "vision_end"),
                   tokenizer.convert_tokens_to_ids([PLACE, VIDEO, START, END]), strict=True))  # fmt: skip
    sizes, tower = PICTURE_FAMILIES[family]
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id}  # fmt: skip
    config = AutoConfig.for_model(
        family,
        text_config={"vocab_size": len(tokenizer), "tie_word_embeddings": False, **ends, **sizes, **text},
        vision_config=dict(tower),
        tie_word_embeddings=False,
        **{f"{name}_token_id": number for name, number in ids.items()},
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
        for parameter in model.model.visual.parameters():
            if parameter.dim() > 1:  # wide, so that another picture shows in the log-probs
                torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    patch = tower.get("patch_size", 14)
    size = {"shortest_edge": (2 * patch) ** 2, "longest_edge": (2 * patch) ** 2 * 16}
    processor = Qwen2VLImageProcessorPil(patch_size=patch, size=size)
    if patch == 16:  # as Qwen3-VL's files have it
        processor.image_mean = processor.image_std = [0.5, 0.5, 0.5]
    processor.save_pretrained(folder)
    return folder
