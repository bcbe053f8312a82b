"""Engines that say to which experts they have sent tokens. vLLM's own capture needs a GPU and was never run."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_engines_async import Counting, make, request  # noqa: F401 - make is a fixture

from roll.strategies.base import Request, SamplingParams
from roll.strategies.engines.engine_backend import Sampled
from roll.strategies.engines.responses import Response
from roll.strategies.engines.vllm.vllm_engine import VllmBackend, sampled_experts


def rows(*numbers, dtype=np.int16):
    """[n, 1 layer, 1 expert]"""
    return np.array(numbers, dtype).reshape(-1, 1, 1)


def response(prompt, tokens):
    found = Response(Request(id="r", prompt_ids=prompt, params=SamplingParams(max_new_tokens=9), seed=0))
    found.tokens, found.logprobs, found.versions = list(tokens), [-1.0] * len(tokens), [0] * len(tokens)
    return found


def told(found):
    return found.completion("stop").routed_experts[:, 0, 0].tolist()


def test_of_the_last_token_and_of_what_no_stream_has_told_nothing_is_known():
    found = response((1, 2), (3, 4, 5))
    assert found.completion("stop").routed_experts is None
    found.route(rows(10, 20, 30, 40))
    assert told(found) == [10, 20, 30, 40, -1]
    found = response((1, 2), (3, 4, 5))
    found.route(rows(10, 20, 30))
    assert told(found) == [10, 20, 30, -1, -1]
    found.tokens, found.logprobs, found.versions = [3], [-1.0], [0]  # the engine has read beyond a stop string
    assert told(found) == [10, 20, -1]


def test_a_token_that_two_streams_have_read_keeps_the_experts_of_the_first():
    found = response((1, 2), (3, 4))
    found.route(rows(10, 20, 30))
    found.tokens, found.logprobs, found.versions = [3, 4, 5], [-1.0] * 3, [0] * 3
    found.route(rows(11, 21, 31, 41))
    assert told(found) == [10, 20, 30, 41, -1]
    found.restart()
    assert found.completion("abort").routed_experts is None


class Telling(Counting):
    """Says with its last tokens that a token at position p under weight w went to expert 100 w + p."""

    async def stream(self, request_id, prompt_ids, params, seed, *, final_only):
        read = len(prompt_ids) - 1
        async for part in super().stream(request_id, prompt_ids, params, seed, final_only=final_only):
            read += len(part.tokens)
            ends = part.ended is not None
            yield Sampled(*part[:3], rows(*(100 * self.weight + np.arange(read))) if ends else None)


def test_a_response_that_goes_on_under_new_weights_has_the_experts_of_both(make):  # noqa: F811
    backend = Telling()
    backend.pace = 0.02
    engine = make(backend)
    engine.submit([request("r", (1, 2, 3), max_new_tokens=40)])
    while not backend.prompts:
        engine.poll(0.01)
    engine.poll(0.2)
    engine.update_weights(1, iter([("w", torch.tensor(7.0))]))
    completions = []
    while not completions:
        completions = engine.poll(5.0)
    (found,) = completions
    first = found.versions.count(0)
    assert 0 < first < 40
    numbers = found.routed_experts[:, 0, 0].tolist()
    old = 3 + first - 1
    start = 100 * 0 if numbers[0] == 0 else numbers[0]
    assert numbers[:old] == [start + p for p in range(old)]
    assert numbers[old:-1] == [700 + p for p in range(old, 42)]
    assert numbers[-1] == -1


def parts_of_vllm(*parts):
    async def generate(prompt, sampling, request_id, lora_request):
        for tokens, reason, experts in parts:
            logprobs = SimpleNamespace(
                start_indices=range(len(tokens)), token_ids=list(tokens), logprobs=[-1.0] * len(tokens)
            )
            part = SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason=reason, routed_experts=experts)
            yield SimpleNamespace(outputs=[part])

    backend = VllmBackend({}, description=None)
    backend._engine, backend._params = SimpleNamespace(generate=generate), lambda *_, **__: None

    async def collect():
        return [
            part async for part in backend.stream("r", (5, 6, 7), SamplingParams(max_new_tokens=4), 0, final_only=True)
        ]

    return asyncio.run(collect())


def test_vllms_experts_come_with_the_last_part_as_small_numbers():
    first, last = parts_of_vllm(((8, 9), None, None), ((4,), "stop", rows(1, 2, 3, 255, 0, dtype=np.uint8)))
    assert first.experts is None
    assert last.experts.dtype == np.int16
    assert last.experts[:, 0, 0].tolist() == [1, 2, 3, 255, 0]


def test_experts_of_other_tokens_than_vllm_has_read_are_refused():
    for wrong in (rows(1, 2, 3, 4), rows(1, 2, 3, 4, 5, 6), np.zeros((5, 2), np.uint8)):
        with pytest.raises(RuntimeError, match="5 tokens read"):
            parts_of_vllm(((8, 9, 4), "length", wrong))
    assert len(sampled_experts(rows(1, 2), 5, complete=False)) == 2  # of an aborted response
