"""Every order of calls (`engine_orders.py`) against vLLM's rules (`fake_async_llm.py`)."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from engine_orders import ACTIONS, BUCKETS, TURNS, Replay, Turns, explore
from fake_async_llm import FakeAsyncLLM

from roll.strategies.engines.async_engine import AsyncEngine
from roll.strategies.engines.vllm.vllm_engine import VllmBackend


class Backend(VllmBackend):
    """vLLM's backend with the stand-in for its engine, and no processes."""

    async def start(self):
        self.fake = self._engine = FakeAsyncLLM()
        self._params = lambda whole, **given: given

    def kill(self):
        pass


def replay(level):
    def freed(sleeping, asleep):  # weights alone may stay: vLLM can't free them alone
        return "kv_cache" not in asleep or level == 0 or sleeping == asleep

    return Replay(Backend({}, BUCKETS, sleep_level=level, update_buffer_bytes=4096), freed)


@pytest.fixture(autouse=True)
def vllm_on_a_gpu(monkeypatch):
    asked = SimpleNamespace(WeightTransferUpdateRequest=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", asked)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.parametrize(("level", "states"), [(0, 7), (1, 8), (2, 11)])
def test_no_order_of_calls_breaks_vllms_rules_samples_from_lost_weights_or_waits_for_ever(level, states):
    assert explore(lambda: replay(level), ACTIONS) == states


@pytest.mark.parametrize("level", [1, 2])
def test_no_order_of_turns_on_a_shared_device_breaks_vllms_rules_or_loses_weights_that_are_needed(level):
    assert explore(lambda: Turns(replay(level)), TURNS) > 5


async def _resumes_always(self):
    await self._engine.resume_generation()


async def _sleeps_twice(self, parts):
    self._asleep.update(parts)
    if len(self._asleep) == 2:
        await self._engine.sleep(level=self._sleep_level)
        self._freed.update(self._asleep)
    return 0


async def _wakes_nothing(self, parts):
    self._asleep.difference_update(parts)


def _opens_with_lost_weights(self):
    self._stale = False
    if not self._asleep:
        self._streams.gate.set()


@pytest.mark.parametrize(
    ("owner", "name", "fault", "message"),
    [
        (VllmBackend, "_resume", _resumes_always, "the scheduler runs while memory is away"),
        (VllmBackend, "sleep", _sleeps_twice, "asleep already|that was to be freed"),
        (VllmBackend, "wake", _wakes_nothing, "it didn't wake"),
        (AsyncEngine, "_open", _opens_with_lost_weights, "DID NOT RAISE|thrown away"),
    ],
)
def test_a_planted_fault_is_found(monkeypatch, owner, name, fault, message):
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(BaseException, match=message):
        explore(lambda: replay(2), ACTIONS)
