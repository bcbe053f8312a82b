"""What the parts of `gpu.py` share: a model of a known size with random weights, and a reward for its words."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

NARROW = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
"""Widths of a dry run."""


def write_model(name: str, folder: Path, *, layers: int | None = None, vocabulary: int | None = None) -> None:
    """Write a random model in the shape of a hub id that `roll plan` knows, in bfloat16, and a tokenizer of words.

    With `layers` and `vocabulary` it has so many, and the widths of a dry run.
    """
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

    from roll.workbench.planning.architecture import known_sizes

    sizes = known_sizes(name)
    if sizes is None:
        raise SystemExit(f"{name}: its sizes aren't built in; take one of roll/workbench/planning/architecture.py")
    if layers is not None and vocabulary is not None:
        sizes = {**sizes, **NARROW, "num_hidden_layers": layers, "vocab_size": vocabulary}
    words = sizes["vocab_size"]
    torch.manual_seed(0)
    config = AutoConfig.for_model(**sizes, pad_token_id=0, max_position_embeddings=32768)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(folder)
    special = {"<pad>": 0, "<end>": 1}
    table = Tokenizer(WordLevel({**special, **{f"w{i}": i for i in range(2, words)}}, unk_token="<pad>"))
    table.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=table, pad_token="<pad>", eos_token="<end>", unk_token="<pad>")
    tokenizer.save_pretrained(folder)


def share_of_low_words(response: str, task: Any) -> float:
    """Return a reward that differs between any two responses, or a group would train nothing."""
    del task
    numbers = [int(word[1:]) for word in response.split() if word[0] == "w"]
    return sum(numbers) / (max(numbers) * len(numbers)) if numbers and max(numbers) else 0.0
