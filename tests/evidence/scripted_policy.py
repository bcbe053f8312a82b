"""A policy that says what a script says: an engine of one's own (`strategy_name: scripted_policy.py:ScriptedEngine`).

The rest of a run is as ever: a tiny model is trained on what was said. Its tokenizer takes long prompts of harnesses in
few tokens, and its chat template names tools without describing them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tiny_models import build_tiny_model

from roll.strategies.base import Completion, InferEngine
from roll.strategies.training.pretrained import load_tokenizer

SCRIPT = "SCRIPTED_POLICY"
"""Environment variable with the script: a list of `{"when": [...], "say": ...}` as JSON. The first rule whose texts all
stand in the prompt speaks, and a policy that has none says `A title`."""

TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for t in tools %}<{{ t.function.name }}> {% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ANSWER = "The answer is 19."
RESULT = "<|im_start|>tool\n"
"""What stands before the result of a call."""


def call(name: str, **arguments: Any) -> str:
    """Return what the policy says to call a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def build_model(folder: Path, texts: list[Path]) -> Path:
    """Write a tiny model, with a tokenizer that has seen `texts`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(text) for text in texts], trainer)
    build_tiny_model(folder, hidden=16, layers=1, vocab_size=4000, max_position_embeddings=32768)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


class ScriptedEngine(InferEngine):
    """See the module docstring."""

    lockstep = True

    def __init__(self, args, options, settings) -> None:
        self._tokenizer = load_tokenizer(args)
        self._rules = json.loads(os.environ[SCRIPT])
        self._waiting: list = []
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    def submit(self, requests) -> None:
        self._waiting += requests

    def poll(self, budget):
        waiting, self._waiting = self._waiting, []
        return [self._completion(request, "stop") for request in waiting]

    def abort(self, request_ids):
        stopped = [request for request in self._waiting if request.id in set(request_ids)]
        self._waiting = [request for request in self._waiting if request not in stopped]
        return [Completion(id=one.id, token_ids=(), logprobs=(), versions=(), finish_reason="abort") for one in stopped]

    def update_weights(self, version, weights) -> None:
        for _ in weights:
            pass
        self._version = version

    def _completion(self, request, reason) -> Completion:
        prompt = self._tokenizer.decode(request.prompt_ids)
        said = next((rule["say"] for rule in self._rules if all(text in prompt for text in rule["when"])), "A title")
        ids = self._tokenizer(f"{said}<|im_end|>", add_special_tokens=False).input_ids
        if len(ids) > request.params.max_new_tokens:
            ids, reason = ids[: request.params.max_new_tokens], "length"
        n = len(ids)
        versions = (self._version,) * n
        return Completion(
            id=request.id, token_ids=ids, logprobs=(-1.0,) * n, versions=versions, finish_reason=reason, steps=1
        )
