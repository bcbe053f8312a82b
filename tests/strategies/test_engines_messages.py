"""How often SGLang says what it has sampled: it needn't be installed."""

from __future__ import annotations

import asyncio

import pytest

from roll.strategies.base import SamplingParams
from roll.strategies.engines.sglang.sglang_engine import SglangBackend


@pytest.mark.parametrize(("final_only", "interval"), [(False, 1), (True, 256)])
def test_tokens_of_a_response_that_nobody_watches_come_many_in_a_message(monkeypatch, final_only, interval):
    backend, sent = SglangBackend({}, None, vocab_size=10), []

    def answer(message):
        sent.append(message)
        backend._streams[message[1]].put_nowait(((5, 6), (-0.1, -0.2), "stop", ""))

    monkeypatch.setattr(backend, "_send", answer)

    async def draw():
        stream = backend.stream("r", [1, 2], SamplingParams(max_new_tokens=4), 0, final_only=final_only)
        return [sampled async for sampled in stream]

    assert asyncio.run(draw()) == [((5, 6), (-0.1, -0.2), "stop", None)]
    ((kind, _, prompt, sampling, _),) = sent
    assert (kind, prompt, sampling["stream_interval"]) == ("generate", (1, 2), interval)
