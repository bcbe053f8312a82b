"""What sft_picture_digits_cpu.yaml and rlvr_picture_digits_cpu.yaml need: drawn digits, and a model that reads them.

`make` writes, unless they are there:

    actor_train.data_args.file_name   rows that show a digit and ask which one it is, and their PNG files beside them
    pretrain                          a Qwen2-VL of some 200,000 random parameters, with tokenizer and image processor

`make_prompts` writes other digits, as prompts with their answers.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.sft_config import SFTConfig
from roll.envs.pixels import Pixels, png_bytes

ROWS = 3000
SIDE = 28
"""Pixels of a picture; the model has a token for each 14 x 14 of them."""
DIGITS = (
    "01110100011001110101110011000101110", "00100011000010000100001000010001110", "01110100010000100010001000100011111",
    "11111000100010000010000011000101110", "00010001100101010010111110001000010", "11111100001111000001000011000101110",
    "00110010001000011110100011000101110", "11111000010001000100010000100001000", "01110100011000101110100011000101110",
    "01110100011000101111000010001001100",
)  # fmt: skip
"""A pixel a character, in rows of five."""
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLACES = {"image": "<|image_pad|>", "video": "<|video_pad|>", "vision_start": "<|vision_start|>",
          "vision_end": "<|vision_end|>"}  # fmt: skip
SPECIAL = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>", *PLACES.values()]


def make(config: SFTConfig) -> None:
    """Write the rows, the pictures and the model, unless they are there."""
    for name in config.actor_train.data_args.file_name:
        write_rows(Path(name), ROWS)
    if config.pretrain is not None and not (Path(config.pretrain) / "config.json").exists():
        write_model(Path(config.pretrain))


def make_prompts(config: RLVRConfig) -> None:
    """Write the prompts and the pictures, unless they are there."""
    for name in config.actor_train.data_args.file_name:
        write_rows(Path(name), ROWS, prompts=True)


def write_rows(file: Path, count: int, *, prompts: bool = False) -> None:
    """Write rows that show a digit each, or prompts that do, and the pictures into a folder beside the file."""
    if file.exists():
        return
    folder = file.parent / f"{file.stem}_pictures"
    folder.mkdir(parents=True, exist_ok=True)
    draw, lines = random.Random(file.stem), []
    for number in range(count):
        digit = number % 10
        (folder / f"{number:04}.png").write_bytes(png_bytes(drawn(digit, draw)))
        prompt = [{"role": "user", "content": "<image>digit?"}]
        row: dict[str, Any] = {"messages": [*prompt, {"role": "assistant", "content": str(digit)}]}
        if prompts:
            row = {"prompt": prompt, "ground_truth": str(digit)}
        lines.append(json.dumps({**row, "images": [f"{folder.name}/{number:04}.png"]}))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def drawn(digit: int, draw: random.Random) -> Pixels:
    """Return a digit somewhere in a picture, bright on dark, with noise."""
    pixels = np.full((SIDE, SIDE, 3), draw.randrange(20, 60), dtype=np.int64)
    shape = np.array([int(bit) for bit in DIGITS[digit]]).reshape(7, 5).repeat(3, 0).repeat(3, 1)
    top, left = draw.randrange(SIDE - 21 + 1), draw.randrange(SIDE - 15 + 1)
    pixels[top : top + 21, left : left + 15][shape == 1] = [draw.randrange(150, 256) for _ in range(3)]
    noise = np.frombuffer(draw.randbytes(pixels.size), dtype=np.uint8).reshape(pixels.shape).astype(np.int64)
    return (pixels + noise // 8 - 16).clip(0, 255).astype(np.uint8)


def write_model(folder: Path) -> None:
    """Write a random model that reads these pictures, the same one every time."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = _tokenizer()
    places = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in PLACES.items()}
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "tie_word_embeddings": False, "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }  # fmt: skip
    tower = {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 7}
    config = AutoConfig.for_model(
        "qwen2_vl", text_config=text, vision_config=tower, tie_word_embeddings=False, **places
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config)
        for weight in model.parameters():
            if weight.dim() > 1:  # the usual range of 0.02 is for wide layers: so few numbers hardly pass a picture on
                torch.nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": 14 * 14, "longest_edge": 14 * 14 * 64}
    Qwen2VLImageProcessorPil(patch_size=7, size=size).save_pretrained(folder)


def _tokenizer() -> Any:
    """A token for each character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = sorted(set("systemuserassistant\ndigit?0123456789 "))
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<|im_end|>",
        additional_special_tokens=SPECIAL[2:], clean_up_tokenization_spaces=False, chat_template=CHAT,
    )  # fmt: skip
