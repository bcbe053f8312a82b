"""`AsyncEngine` over a backend made of arithmetic: what every engine that computes on its own does the same way."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import pytest
import torch

from roll.pipelines.workers.engine_probe import EngineProbes
from roll.strategies.base import EngineDied, Request, RequestRefused, SamplingParams
from roll.strategies.engines import response_streams
from roll.strategies.engines.async_engine import AsyncEngine
from roll.strategies.engines.engine_backend import EngineBackend, Sampled
from roll.strategies.engines.responses import ResponseRules
from roll.utils.seeding import stable_hash

EOS = 99


class Counting(EngineBackend):
    """Token i of a response is its position in the context; its log-prob says which weights it was drawn under."""

    def __init__(self, pace=0.005, chunk=1):
        self.pace, self.chunk = pace, chunk
        self.weight = 0.0
        self.calls = []
        self.open = {}
        self.aborted = set()
        self.broken = None
        self.stuck = False
        self.prompts = []
        self.seeds = []
        self.killed = False
        self.deaf = 0

    async def start(self):
        self.calls.append("start")
        if self.broken:
            raise self.broken

    async def stream(self, request_id, prompt_ids, params, seed, *, final_only):
        self.prompts.append(tuple(prompt_ids))
        self.seeds.append(seed)
        assert params.ignore_eos and not params.stop_strings
        self.open[request_id] = True
        position, left = len(prompt_ids), params.max_new_tokens
        try:
            while left > 0:
                await asyncio.sleep(self.pace)
                if request_id in self.aborted:
                    yield Sampled((), (), "abort")
                    return
                tokens = [position + i for i in range(min(self.chunk, left))]
                position, left = position + len(tokens), left - len(tokens)
                yield Sampled(tokens, [-self.weight - 1.0] * len(tokens), "length" if left == 0 else None)
        finally:
            del self.open[request_id]

    async def abort_running(self, request_ids):
        if self.deaf:
            self.deaf -= 1
            return
        self.aborted.update(request_ids)

    async def load(self, version, weights):
        assert not self.open, "a stream runs across a weight update"
        async for name, tensor in weights:
            if name != "w":
                raise ValueError(f"unknown weight {name!r}")
            self.weight = float(tensor)
        if self.stuck:
            await asyncio.sleep(60)

    async def sleep(self, parts):
        self.calls.append(("sleep", tuple(parts)))
        return 7

    async def wake(self, parts):
        self.calls.append(("wake", tuple(parts)))

    async def health(self):
        if self.broken:
            raise self.broken

    async def shutdown(self):
        self.calls.append("shutdown")

    def kill(self):
        self.killed = True


@pytest.fixture
def make():
    engines = []

    def build(backend=None, *, decode=None, max_context=1000, **options):
        rules = ResponseRules(frozenset({EOS}), max_context, decode)
        engines.append(AsyncEngine(backend or Counting(), rules, **{"timeout": 20.0, **options}))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


def request(name, prompt=(1, 2), **params):
    options = {"max_new_tokens": 5, "ignore_eos": True, **params}
    return Request(id=name, prompt_ids=tuple(prompt), params=SamplingParams(**options), seed=stable_hash(name))


def collect(engine, count, seconds=10.0):
    done, end = {}, time.monotonic() + seconds
    while len(done) < count:
        assert time.monotonic() < end, f"only {sorted(done)} finished"
        done.update({c.id: c for c in engine.poll(0.5)})
    return done


def until(true, seconds=5.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it didn't happen"
        time.sleep(0.002)


def let_all_get_tokens(engine):
    """Wait until every response has got tokens since now."""
    before = {response: len(response.tokens) for response in engine._streams.responses.values()}
    until(lambda: all(len(response.tokens) > count for response, count in before.items()))


def test_responses_come_out_with_one_logprob_and_version_per_token(make):
    engine = make()
    engine.submit([request(f"r{i}", range(1, 3 + i), max_new_tokens=3 + i) for i in range(20)])
    for i, completion in ((int(c.id[1:]), c) for c in collect(engine, 20).values()):
        assert completion.token_ids == tuple(range(2 + i, 5 + 2 * i))
        assert completion.logprobs == (-1.0,) * (3 + i)
        assert completion.versions == (0,) * (3 + i)
        assert completion.finish_reason == "length"
    assert engine.poll(0.0) == []


def test_an_update_lets_responses_go_on_from_their_tokens_and_names_each_tokens_version(make):
    backend = Counting()
    backend.deaf = 1  # an abort that is lost is repeated; no stream may be left when weights change
    engine = make(backend)
    engine.submit([request(f"r{i}", max_new_tokens=120) for i in range(4)])
    until(lambda: all(response.task for response in engine._streams.responses.values()))
    for version in (3, 5):
        let_all_get_tokens(engine)
        engine.update_weights(version, iter([("w", torch.tensor(float(version)))]))
        assert engine.version == version
    for completion in collect(engine, 4).values():
        assert completion.token_ids == tuple(range(2, 122))
        assert set(completion.versions) == {0, 3, 5}
        assert list(completion.versions) == sorted(completion.versions)
        assert completion.logprobs == tuple(-v - 1.0 for v in completion.versions)
    assert engine._counters.resumed == 8
    assert len(set(backend.seeds)) == 12  # a continuation never repeats the draws before it
    assert max(map(len, backend.prompts)) > 2  # it is given the tokens so far


def test_restart_throws_away_what_was_sampled_under_old_weights(make):
    engine = make(partial_rollout="restart")
    engine.submit([request("r", max_new_tokens=60)])
    until(lambda: all(response.task for response in engine._streams.responses.values()))
    let_all_get_tokens(engine)
    engine.update_weights(1, [("w", torch.tensor(1.0))])
    (completion,) = collect(engine, 1).values()
    assert completion.token_ids == tuple(range(2, 62))
    assert set(completion.versions) == {1}
    assert engine._counters.restarted == 1
    assert engine._counters.discarded_tokens > 0


def test_weights_are_read_in_the_thread_that_brings_them(make):
    engine = make()
    threads = []

    def weights():
        for _ in range(3):
            threads.append(threading.current_thread())
            yield "w", torch.tensor(2.0)

    engine.update_weights(1, weights())
    assert threads == [threading.current_thread()] * 3


@pytest.mark.parametrize("chunk", [1, 4])
def test_responses_end_with_the_token_that_ends_them_whatever_comes_in_one_piece(make, chunk):
    engine = make(Counting(chunk=chunk), decode=lambda ids: "".join(f"<{i}>" for i in ids), max_context=120)
    engine.submit(
        [
            request("eos", range(90), max_new_tokens=50, ignore_eos=False),
            request("ignored", range(90), max_new_tokens=50),
            request("token", max_new_tokens=50, stop_token_ids=(7,)),
            request("string", max_new_tokens=50, stop_strings=("6><7",)),
        ]
    )
    done = collect(engine, 4)
    assert (done["eos"].token_ids, done["eos"].finish_reason) == (tuple(range(90, 100)), "stop")
    assert (done["ignored"].token_ids, done["ignored"].finish_reason) == (tuple(range(90, 120)), "length")
    assert (done["token"].token_ids[-1], done["token"].finish_reason) == (7, "stop")
    assert (done["string"].token_ids[-1], done["string"].finish_reason) == (7, "stop")


def test_abort_keeps_the_tokens_and_ignores_unknown_and_finished_ids(make):
    backend = Counting()
    backend.deaf = 1  # the first abort overtakes the start of the stream and is lost
    engine = make(backend)
    engine.submit([request("short"), request("long", max_new_tokens=900)])
    collect(engine, 1)
    (gone,) = engine.abort(["long", "short", "unknown"])
    assert (gone.id, gone.finish_reason) == ("long", "abort")
    assert gone.token_ids == tuple(range(2, 2 + len(gone.token_ids)))
    assert len(gone.token_ids) >= 1
    assert not backend.open
    assert engine.poll(0.05) == []
    engine.submit([request("long")])  # its id is free again
    collect(engine, 1)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("r", ()), "empty prompt"),
        (request("r", range(1000)), "1000 prompt tokens"),
        (request("good"), "already running"),
        (request("r", max_new_tokens=0), "max_new_tokens"),
        (request("r", stop_strings=("x",)), "need a tokenizer"),
    ],
)
def test_a_malformed_request_is_refused_before_anything_is_queued(make, bad, message):
    engine = make()
    with pytest.raises(ValueError, match=message):
        engine.submit([request("good"), bad])
    assert engine.poll(0.05) == []
    assert not engine.abort(["good"])


def test_poll_returns_as_soon_as_something_finished_and_at_the_latest_after_its_budget(make):
    engine = make()
    start = time.monotonic()
    assert engine.poll(0.05) == []
    assert time.monotonic() - start >= 0.05
    threading.Timer(0.05, engine.submit, [[request("r")]]).start()
    assert [c.id for c in engine.poll(30.0)] == ["r"]
    assert time.monotonic() - start < 10.0


def test_responses_that_only_a_batch_waits_for_come_together_and_all_others_at_once(make, monkeypatch):
    monkeypatch.setattr(response_streams, "_BATCH_WAIT_S", 60.0)
    engine = make(Counting(pace=0.01))
    engine.submit(
        [replace(request(name, max_new_tokens=n), patient=True) for name, n in {"a": 2, "b": 9, "c": 40}.items()]
    )
    assert [completion.id for completion in engine.poll(90.0)] == ["a", "b", "c"], "no more can come"
    engine.submit([replace(request("d", max_new_tokens=900), patient=True), request("waited for", max_new_tokens=1)])
    assert [completion.id for completion in engine.poll(90.0)] == ["waited for"]
    monkeypatch.setattr(response_streams, "_BATCH", 3)
    engine.submit([replace(request(str(n), max_new_tokens=1), patient=True) for n in range(3)])
    assert sorted(completion.id for completion in engine.poll(90.0)) == ["0", "1", "2"]
    assert [completion.id for completion in engine.abort(["d"])] == ["d"], "the longest was on its way all the time"


def test_many_threads_may_submit_poll_and_abort_at_once(make):
    engine = make(Counting(pace=0.0))
    done, lock = {}, threading.Lock()

    def work(i):
        engine.submit([request(f"{i}-{k}", max_new_tokens=1 + k) for k in range(25)])
        got = [c for _ in range(10) for c in engine.poll(0.01)] + engine.abort([f"{i}-24", f"{i}-23"])
        with lock:
            done.update({c.id: c for c in got})

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for version in range(1, 4):
        engine.update_weights(version, [("w", torch.tensor(float(version)))])
    for thread in threads:
        thread.join(10)
    done.update(collect(engine, 200 - len(done)))
    assert len(done) == 200
    for name, completion in done.items():
        full = 1 + int(name.split("-")[1])
        assert len(completion.token_ids) == full or completion.finish_reason == "abort"


def test_a_wrong_weight_is_the_callers_error_and_the_engines_end(make):
    backend = Counting()
    engine = make(backend)
    engine.submit([request("r", max_new_tokens=900)])
    with pytest.raises(ValueError, match="unknown weight 'x'"):
        engine.update_weights(1, [("w", torch.tensor(1.0)), ("x", torch.tensor(1.0))])
    with pytest.raises(EngineDied, match="unknown weight 'x'"):
        engine.poll(5.0)
    with pytest.raises(EngineDied):
        engine.submit([request("s")])
    assert engine.version == 0


def test_an_error_of_the_weight_stream_reaches_the_caller(make):
    engine = make()

    def weights():
        yield "w", torch.tensor(1.0)
        raise OSError("the trainer is gone")

    with pytest.raises(OSError, match="the trainer is gone"):
        engine.update_weights(1, weights())
    with pytest.raises(EngineDied):
        engine.poll(0.0)


def test_when_the_engine_dies_poll_hands_out_what_finished_and_then_says_why(make):
    backend = Counting()
    engine = make(backend)
    engine.submit([request("short"), request("long", max_new_tokens=900)])
    until(lambda: engine._streams.finished)
    backend.broken = OSError("process 12 was killed")
    until(lambda: engine._loop.cause is not None)
    assert [c.id for c in engine.poll(0.0)] == ["short"]
    with pytest.raises(EngineDied, match="process 12 was killed"):
        engine.poll(5.0)
    (rescued,) = engine.abort(["long"])
    assert rescued.finish_reason == "abort" and rescued.token_ids


def test_a_logprob_that_is_no_number_ends_the_engine(make):
    engine = make()
    engine.update_weights(4, [("w", torch.tensor(float("nan")))])
    engine.submit([request("r")])
    with pytest.raises(EngineDied, match="version 4 are infinite or not a number"):
        engine.poll(5.0)


def test_an_operation_that_hangs_ends_with_an_error_that_says_what_was_waited_for(make):
    backend = Counting()
    engine = make(backend, timeout=0.2)
    backend.stuck = True
    with pytest.raises(TimeoutError, match="weights of version 1"):
        engine.update_weights(1, [("w", torch.tensor(1.0))])
    with pytest.raises(EngineDied):
        engine.poll(0.0)


def test_sleep_needs_an_idle_engine_and_requests_need_one_that_is_awake_and_fresh(make):
    backend = Counting()
    engine = make(backend)
    engine.submit([request("r", max_new_tokens=900)])
    with pytest.raises(RuntimeError, match="1 requests are on their way"):
        engine.sleep()
    engine.abort(["r"])
    assert engine.sleep() == 7
    with pytest.raises(RuntimeError, match="kv_cache, weights sleep"):
        engine.submit([request("r")])
    engine.wake(["weights"])
    engine.update_weights(1, [("w", torch.tensor(1.0))])
    engine.wake(["kv_cache"])
    engine.submit([request("r")])
    assert collect(engine, 1)["r"].versions == (1,) * 5
    engine.sleep(["kv_cache"])
    slept = list(backend.calls)
    assert engine.sleep(["kv_cache"]) == 0
    assert backend.calls == slept  # SGLang would read weights that are away, vLLM refuses
    engine.wake()
    engine.submit([request("s")])
    collect(engine, 1)
    engine.sleep(["weights"])
    engine.wake(["weights"])
    with pytest.raises(RuntimeError, match="its weights slept"):
        engine.submit([request("t")])


def test_a_start_that_fails_says_why_and_leaves_nothing_behind(make):
    backend = Counting()
    backend.broken = OSError("no such device")
    with pytest.raises(EngineDied, match="no such device"):
        make(backend)
    assert backend.calls == ["start", "shutdown"] and backend.killed


def test_close_ends_everything_and_a_second_call_does_nothing(make):
    backend = Counting()
    engine = make(backend)
    engine.submit([request("r", max_new_tokens=900)])

    def poll():
        with pytest.raises(EngineDied):
            engine.poll(30.0)

    poller = threading.Thread(target=poll)
    poller.start()
    engine.close()
    engine.close()
    poller.join(5)
    assert not poller.is_alive()
    assert backend.calls == ["start", "shutdown"] and backend.killed
    with pytest.raises(EngineDied, match="closed"):
        engine.submit([request("s")])
    assert engine._loop.thread.loop.is_closed()


class Choosy(Counting):
    """Refuses prompts that begin with 13, as an engine does that knows a rule which nobody else does."""

    async def stream(self, request_id, prompt_ids, params, seed, *, final_only):
        if prompt_ids[0] == 13:
            raise RequestRefused("the engine has no 13")
        async for part in super().stream(request_id, prompt_ids, params, seed, final_only=final_only):
            yield part


def test_a_request_that_the_engine_refuses_ends_alone(make):
    engine = make(Choosy())
    engine.submit([request("good"), request("bad", (13,)), request("other")])
    done = collect(engine, 3)
    assert {name: completion.refused for name, completion in done.items()} == {
        "good": "", "bad": "the engine has no 13", "other": "",
    }  # fmt: skip
    assert done["good"].num_tokens == 5 and done["bad"].num_tokens == 0
    engine.submit([request("later")])
    assert collect(engine, 1)["later"].finish_reason == "length"


def test_a_worker_says_of_each_request_of_a_call_whether_its_engine_refuses_it(make):
    probes = EngineProbes(make(Choosy(), max_context=20), timeout=10.0)
    probes.submit([request("good"), request("long", range(1, 30)), request("hot", temperature=-1.0)])
    done, end = {}, time.monotonic() + 10
    while len(done) < 3 and time.monotonic() < end:
        done.update({completion.id: completion for completion in probes.poll(0.5)})
    assert done["good"].finish_reason == "length" and not done["good"].refused
    assert "29 prompt tokens; the model holds 20" in done["long"].refused
    assert "has temperature -1.0; expected" in done["hot"].refused
