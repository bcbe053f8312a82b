"""What both sides of `grpo_vs_trl.py` share: the model, the prompts, the reward, and the talk with the benchmark.

Imported in two environments, so it needs nothing beyond torch and transformers.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

VOCABULARY = 1024
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048,
         "tie_word_embeddings": False}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Task:
    """One workload; both sides get exactly this."""

    prompts: int
    """Distinct prompts per step."""
    samples: int
    """Responses per prompt."""
    prompt_length: int
    response_length: int
    """Longest response, in tokens."""
    mean_length: int | None = None
    """None: every response has `response_length` tokens. Else each token ends its response with probability
    1 / `mean_length`, up to `response_length`."""
    threads: int
    steps: int
    """Steps that there are prompts for."""
    learning_rate: float = 1e-6
    model: str | None = None
    """Folder of the model of the quickstart, which our side then runs as it is shipped; None: a random model."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end a response of that model."""

    @property
    def rows(self) -> int:
        """Return responses per step."""
        return self.prompts * self.samples


def write_files(folder: Path, task: Task) -> None:
    """Write `model/` (random Llama and a tokenizer of words) and `prompts.jsonl`.

    Logits of the random model are nearly equal, so the number of tokens that end a response, out of the vocabulary,
    sets how long responses get: the same law for whoever samples, without any change to either sampler. The tokenizer's
    own end token lies beyond the model's vocabulary: with no other one, responses run to their longest.
    """
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

    torch.manual_seed(0)
    end = VOCABULARY
    ends = [] if task.mean_length is None else list(range(1, 1 + round(VOCABULARY / task.mean_length)))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", pad_token_id=0, **SHAPE))
    model.generation_config = GenerationConfig(eos_token_id=[*ends, end], pad_token_id=0)
    model.save_pretrained(folder / "model")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY + 1)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token=f"w{end}", unk_token="w0")
    tokenizer.save_pretrained(folder / "model")
    rng = random.Random(1)
    first = 1 + len(ends)
    lines = []
    for i in range(task.steps * task.prompts):
        prompt = " ".join(f"w{rng.randrange(first, VOCABULARY)}" for _ in range(task.prompt_length))
        lines.append(json.dumps({"id": str(i), "tag": "words", "prompt": prompt, "ground_truth": "none"}) + "\n")
    (folder / "prompts.jsonl").write_text("".join(lines))


def score(response: str) -> float:
    """Return a number that differs between any two responses, or a group without a difference would train nothing."""
    numbers = [int(word[1:]) for word in response.split()]
    return sum(numbers) / (VOCABULARY * len(numbers)) if numbers else 0.0


def words(response: str, task: Any) -> float:
    """Return the reward function as this framework calls it."""
    del task
    return score(response)


def solved(response: str, answer: str) -> float:
    """Return 1 if the first line is the number that a task of the quickstart asks for."""
    lines = response.strip().splitlines()
    return float(bool(lines) and lines[0].strip() == answer)


class Turns:
    """The benchmark's side of this process: wait for a command, answer with figures."""

    def __init__(self, address: str) -> None:
        self._connection: Connection = Client(address, family="AF_UNIX")

    def say(self, **figures: Any) -> None:
        """Answer the last command."""
        self._connection.send(figures)

    def next(self) -> str:
        """Return the next command: `step`, `bare` or `stop`."""
        command: str = self._connection.recv()
        return command


def note_time(file: Path, name: str) -> None:
    """Add to a file that this has happened now."""
    with file.open("a") as notes:
        notes.write(json.dumps([name, time.monotonic()]) + "\n")
