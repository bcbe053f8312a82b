"""A judge on an engine of the run: whatever one response does, the others get their scores."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from roll.pipelines.workers.judge_endpoint import JudgeFailed
from roll.pipelines.workers.judge_engine import EngineJudge
from roll.rewards.judge_cache import JudgeVerdict
from roll.strategies.base import Completion


class OneEngine:
    """A cluster of one rank that completes each request with one token."""

    world_size = 1

    def __init__(self):
        self.waiting = []

    async def call_rank_async(self, rank, method, argument):
        if method.__name__ == "submit":
            self.waiting += argument
            return None
        done, self.waiting = self.waiting, []
        return [
            Completion(id=each.id, token_ids=(7,), logprobs=(0.0,), versions=(0,), finish_reason="stop")
            for each in done
        ]


class Tokenizer:
    """One token for each text; decoding fails for the first completion."""

    chat_template = "{{ messages }}"
    all_special_tokens = ()

    def __init__(self):
        self.decoded = 0

    def get_added_vocab(self):
        return {}

    def apply_chat_template(self, *args, **options):
        return "text"

    def __call__(self, text, **options):
        return {"input_ids": [1, 2]}

    def decode(self, ids, **options):
        self.decoded += 1
        if self.decoded == 1:
            raise UnicodeError("half a character")
        return "Score: 5"


@pytest.fixture
def judge(monkeypatch):
    monkeypatch.setattr("roll.pipelines.workers.judge_engine.resolved_model_args", lambda *_: SimpleNamespace())
    monkeypatch.setattr("roll.pipelines.workers.judge_engine.render_chat", lambda *_, **__: "text")
    sampling = SimpleNamespace(
        max_new_tokens=4, temperature=0.0, do_sample=False, top_p=1.0, top_k=0, repetition_penalty=1.0, stop_strings=()
    )
    strategy = SimpleNamespace(strategy_name="hf_infer")
    section = SimpleNamespace(
        generating_args=sampling, strategy_args=strategy, max_length=64, max_in_flight=8, chat_template_kwargs={}
    )
    engine = EngineJudge(OneEngine(), SimpleNamespace(judge=section), Tokenizer())
    yield engine
    engine.close()


MESSAGES = [{"role": "user", "content": "good?"}]


def test_an_answer_that_can_not_be_read_leaves_no_other_open(judge):
    with judge._lock:
        judge._gathered.append(("held back", MESSAGES, first := Future()))
    second = judge.ask("b", MESSAGES)
    judge._flush()
    with pytest.raises(UnicodeError):
        first.result(timeout=20)
    assert second.result(timeout=20) == JudgeVerdict("Score: 5", 2, 1)


def test_who_has_stopped_waiting_holds_nobody(judge):
    with judge._lock:
        judge._gathered.append(("held back", MESSAGES, first := Future()))
    first.cancel()
    second = judge.ask("b", MESSAGES)
    judge._flush()
    assert second.result(timeout=20).prompt_tokens == 2


def test_closing_ends_who_waits(judge, monkeypatch):
    async def never(*_):
        await asyncio.sleep(600)

    monkeypatch.setattr(judge._cluster, "call_rank_async", never)
    waiting = judge.ask("a", MESSAGES)
    judge._flush()
    judge._thread.submit(_turns()).result(20)
    judge._thread.cancel_all(timeout=10)
    with pytest.raises(JudgeFailed, match="the judge was ended"):
        waiting.result(timeout=20)


async def _turns():
    for _ in range(5):
        await asyncio.sleep(0)
