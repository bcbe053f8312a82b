"""Every order of calls (`engine_orders.py`) against SGLang's rules (`fake_sglang.py`)."""

from __future__ import annotations

import pytest
import torch
from engine_orders import ACTIONS, TURNS, Replay, Turns, explore
from fake_sglang import Backend, install

from roll.strategies.engines.async_engine import AsyncEngine
from roll.strategies.engines.sglang import sglang_loader as loader
from roll.strategies.engines.sglang.host import _Host
from roll.strategies.engines.sglang.sglang_channel import Answers
from roll.strategies.engines.sglang.sglang_engine import SglangBackend


@pytest.fixture(autouse=True)
def sglang_on_a_gpu(monkeypatch):
    install(monkeypatch)


def replay(**arguments):
    return Replay(Backend(**arguments), lambda sleeping, asleep: sleeping == asleep)


def test_no_order_of_calls_breaks_sglangs_rules_samples_from_lost_weights_or_waits_for_ever():
    assert explore(replay, ACTIONS) == 8


def test_no_order_of_turns_on_a_shared_device_breaks_sglangs_rules_or_loses_weights_that_are_needed():
    assert explore(lambda: Turns(replay()), TURNS) > 5


def test_all_ranks_of_all_stages_sample_from_the_weights_that_came_last():
    assert explore(lambda: replay(tp_size=2, pp_size=2), ["update", "sample"]) == 2


def test_an_update_that_leaves_a_parameter_untouched_ends_the_engine():
    run = replay(tp_size=2)
    try:
        run.engine.update_weights(1, iter([("w", torch.full((4,), 1.0))]))
        run.engine._backend.fake.ranks[1].skips = True
        with pytest.raises(BaseException, match="left parameters of the weight update untouched"):
            run.engine.update_weights(2, iter([("w", torch.full((4,), 2.0))]))
    finally:
        run.engine.close()


def test_writing_to_a_parameter_is_seen_in_whatever_way_a_loader_does_it():
    model = torch.nn.Module()
    for name in ("whole", "part", "data", "stacked", "tied", "left"):
        model.register_parameter(name, torch.nn.Parameter(torch.zeros(2, 3)))
    model.same = model.tied
    loader._written.clear()
    with loader._Watch(), torch.no_grad():
        model.whole.copy_(torch.ones(2, 3))
        model.part[0].copy_(torch.ones(3))
        model.data.data.copy_(torch.ones(2, 3))
        model.stacked.data.narrow(0, 1, 1).copy_(torch.ones(1, 3))
        model.same.data.fill_(1.0)
    assert loader.untouched(model) == ["left"]


def test_what_sleep_freed_is_counted_on_the_devices_of_all_ranks_and_no_others(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    engine = replay(tp_size=2, pp_size=2).engine
    try:
        assert engine.sleep() == 4 * 2  # ranks x parts
    finally:
        engine.close()


async def _frees_at_once(self, tags):
    await self._manager.release_memory_occupation(_tags(tags), None)
    return 0


async def _frees_all(self, parts):
    return await self._call("release", ["weights", "kv_cache"])


async def _wakes_nothing(self, parts):
    pass


async def _keeps_the_cache(self):
    pass


async def _asks_one(self, timeout):
    return True


def _opens_with_lost_weights(self):
    self._stale = False
    if not self._asleep:
        self._streams.gate.set()


def _tags(tags):
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

    return ReleaseMemoryOccupationReqInput(tags=tags)


@pytest.mark.parametrize(
    ("owner", "name", "fault", "stages", "message"),
    [
        (_Host, "do_release", _frees_at_once, 1, "isn't idle"),
        (_Host, "_settle", _keeps_the_cache, 1, "keys and values of other weights|isn't idle"),
        (SglangBackend, "sleep", _frees_all, 1, "isn't|away already|didn't wake"),
        (SglangBackend, "wake", _wakes_nothing, 1, "it didn't wake"),
        (AsyncEngine, "_open", _opens_with_lost_weights, 1, "DID NOT RAISE|were given back"),
        (Answers, "wait", _asks_one, 2, "ranks with different weights"),
    ],
)
def test_a_planted_fault_is_found(monkeypatch, owner, name, fault, stages, message):
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(BaseException, match=message):
        explore(lambda: replay(pp_size=stages), ACTIONS)
