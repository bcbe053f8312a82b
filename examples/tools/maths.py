"""Sums that a tiny model can't do in its head, and a random model for their signs: `prepare` of sft_maths.yaml.

Makes, unless they are there: demonstrations for the warm start, tasks for training, other tasks for validation, and the
model. Half of the demonstrations call `python` and repeat its result, the others guess: the warm model has seen both,
and nothing says which is better.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roll.configs.schema.sft_config import SFTConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
from small_agents import save_random_model, write

SHOWN, TRAINING, HELD_OUT = 2_000, 2_000, 200
CALLING = 0.5
"""Share of the demonstrations that call the tool."""
SPECIAL = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>"]
WORDS = ["system", "user", "assistant", "tool", "name", "python", "arguments", "code", "Error"]
SIGNS = '0123456789+-* \n{}":,.'
CHAT = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t.function.name }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A short one: of the tools it tells the names, and calls are written in the form of Hermes and Qwen."""


def prepare(config: SFTConfig) -> None:
    """Write the files and the model. Everything follows from the seed, but the validation tasks are always the same."""
    (shown,) = map(Path, config.actor_train.data_args.file_name)
    folder, model = shown.parent, Path(config.pretrain or "")
    if shown.is_file() and (model / "config.json").is_file():
        return
    held_out = list(sums(HELD_OUT, seed=0, without=set()))
    tasks = list(sums(SHOWN + TRAINING, seed=1 + config.seed, without=set(held_out)))
    rng = random.Random(config.seed)
    write(folder / "held_out.jsonl", [row(task) for task in held_out])
    write(folder / "tasks.jsonl", [row(task) for task in tasks[SHOWN:]])
    write(shown, [demonstration(task, rng) for task in tasks[:SHOWN]])
    make_model(model, config.seed)


def sums(count: int, *, seed: int, without: set[str]) -> Iterator[str]:
    """Yield different expressions such as `37*48+5`."""
    rng, taken = random.Random(seed), set(without)
    while count:
        first, second = (rng.choice("+-*") for _ in range(2))
        text = f"{rng.randint(10, 99)}{first}{rng.randint(10, 99)}{second}{rng.randint(1, 9)}"
        if text not in taken:
            taken.add(text)
            count -= 1
            yield text


def row(task: str) -> dict[str, Any]:
    """Return a row of `pipeline: rlvr`."""
    return {"prompt": task, "ground_truth": str(eval(task)), "tag": "maths"}


def demonstration(task: str, rng: random.Random) -> dict[str, Any]:
    """Return a row of `pipeline: sft`: the question, and the tool's way or a guess."""
    said = [("system", "python"), ("user", task)]
    if rng.random() < CALLING:
        call = json.dumps({"name": "python", "arguments": {"code": task}})
        said += [("assistant", f"<tool_call>{call}</tool_call>"), ("tool", str(eval(task)))]
        said.append(("assistant", str(eval(task))))
    else:
        said.append(("assistant", str(eval(task) + rng.choice((-1, 1)) * rng.randint(1, 99))))
    return {"messages": [{"role": role, "content": content} for role, content in said]}


def make_model(folder: Path, seed: int) -> None:
    """Make a random transformer with a token for each sign, and for the few words of calls."""
    save_random_model(
        folder,
        make_tokenizer(),
        seed,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=256,
        rope_theta=100.0,
        initializer_range=0.1,
    )


def make_tokenizer() -> Any:
    """Return a tokenizer that gives every text back as it was."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *TAGS, *WORDS, *SIGNS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[A-Za-z]+|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT,
    )
