"""Every order of sleep, wake, weight sync, requests and aborts against the rules of an engine library, for which a fake
stands in, and every order of the turns in which a run's roles share the device.

Orders that lead to the same state go on alike, so each state is gone on from once: this covers orders of any length.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from roll.distributed.worker import Worker
from roll.pipelines.run.role_offload import ENGINE, TRAINER, DeviceOffloader
from roll.strategies.base import Request, SamplingParams
from roll.strategies.engines.async_engine import AsyncEngine
from roll.strategies.engines.responses import ResponseRules

LONG = 2  # a response of more tokens than one runs until it is aborted

BUCKETS = SimpleNamespace(bucket_bytes=lambda size: size, checkpoint=lambda weights: weights)
PARTS = {"weights": ("weights",), "cache": ("kv_cache",), "both": ("weights", "kv_cache")}
ACTIONS = [
    *(f"{verb} {parts}" for verb in ("sleep", "wake") for parts in PARTS), "update", "sample", "submit", "abort",
]  # fmt: skip
TURNS = [TRAINER, "reference", "forget", "sync", "sample"]


class Illegal(Exception):
    """A call that the library refuses, ignores, or answers with garbage."""


class Replay:
    """One engine, and in a few lines what it must do: `refused` names calls that raise and change nothing.

    Args:
        backend: of the engine, with the stand-in `backend.fake`.
        freed: whether what sleeps in the stand-in is all that must, of what was put to sleep.
    """

    def __init__(self, backend, freed):
        self.backend = backend
        self.engine = AsyncEngine(backend, ResponseRules(frozenset({99}), 100), timeout=5.0)
        self.fake = backend.fake
        self.freed = freed
        self.asleep, self.stale, self.waiting, self.version = set(), False, False, 0

    @property
    def state(self):
        """All that later calls can depend on, but for the number of the version."""
        code, backend = self.engine, vars(self.backend)
        ours = frozenset(code._asleep), code._stale, code._streams.gate.is_set(), len(code._streams.responses)
        held = tuple(frozenset(v) if isinstance(v, set) else v for v in backend.values() if isinstance(v, (set, bool)))
        return ours, held, self.fake.state

    def do(self, action):
        verb, *parts = action.split()
        self.step(verb, PARTS[parts[0]] if parts else ())

    def step(self, verb, parts=()):
        if self.refused(verb):
            with pytest.raises(RuntimeError):
                self.act(verb, parts)
        else:
            self.act(verb, parts)
        self.check()

    def refused(self, verb):
        if verb == "sleep":
            return self.waiting
        if verb == "update":
            return "weights" in self.asleep
        return verb in ("sample", "submit") and bool(self.asleep or self.stale)

    def act(self, verb, parts):
        if verb == "sleep":
            self.engine.sleep(parts)
            self.asleep |= set(parts)
            self.stale = self.stale or "weights" in parts
        elif verb == "wake":
            self.engine.wake(parts)
            self.asleep -= set(parts)
        elif verb == "update":
            self.engine.update_weights(self.version + 1, [("w", torch.full((4,), self.version + 1.0))])
            self.version, self.stale = self.version + 1, False
        elif verb == "sample":
            self.engine.submit([request("short", 1)])
            end, done = time.monotonic() + 5, []
            while not done and time.monotonic() < end:
                done = self.engine.poll(1.0)
            assert len(done) == 1, (done, self.fake.illegal)
            completion = done[0]
            assert (completion.token_ids, completion.versions) == ((self.version,), (self.version,)), completion
        elif verb == "submit":
            if not self.waiting:
                self.engine.submit([request("long", LONG)])
                self.waiting = True
                self.settle()
        else:
            stopped = self.engine.abort(["long"])
            assert [one.id for one in stopped] == ["long"] * self.waiting
            self.waiting = False

    def settle(self):
        """Wait until the request that stays has reached the stand-in, or waits at the gate, and others have left it."""
        end = time.monotonic() + 5
        while bool(self.fake.running) != (self.waiting and self.engine._streams.gate.is_set()):
            assert time.monotonic() < end, "it never began" if self.waiting else "it never ended"
            time.sleep(0.0005)

    def check(self):
        self.settle()
        assert self.fake.illegal == [], self.fake.illegal
        assert self.engine._loop.cause is None, self.engine._loop.cause
        assert self.fake.sleeping <= self.asleep, "it didn't wake"
        assert self.freed(self.fake.sleeping, self.asleep), "memory that was to be freed isn't"

    def way_back(self):
        """From anywhere an engine comes back to sampling, with weights of its own version."""
        for action in ("abort", "wake both", "update", "sample"):
            self.do(action)
        assert not self.fake.sleeping


def request(name, tokens):
    return Request(
        id=name, prompt_ids=(1,), params=SamplingParams(max_new_tokens=tokens, ignore_eos=True), seed=1, order=(0,)
    )


class Turns:
    """One engine and two trainers on one device, as a pipeline moves them."""

    def __init__(self, replay):
        self.replay = replay
        self.engine = self.replay.engine
        self.fresh = False
        self.offloader = DeviceOffloader([(ENGINE, TRAINER), (ENGINE, "reference"), (TRAINER, "reference")])
        for role in (ENGINE, TRAINER, "reference"):
            self.offloader.add(role, SimpleNamespace(call=self.moves_engine if role == ENGINE else self.moves_trainer))

    def moves_engine(self, method, *args):
        if method is Worker.device:
            return ["cuda:0"]
        self.replay.step(method.__name__, *args)
        return [0]

    def moves_trainer(self, method, *args):
        return ["cuda:0"] if method is Worker.device else [0]

    @property
    def state(self):
        away = tuple(frozenset(parts) for parts in self.offloader.offloaded.values())
        return away, self.fresh, self.offloader._engine_is_fresh, self.replay.state

    def do(self, action):
        if action == "sync":
            with self.offloader.while_syncing():
                assert not self.replay.refused("update")
                self.replay.do("update")
            self.fresh = True
        elif action == "forget":
            self.offloader.mark_engine_stale()
            self.fresh = False
        elif action == "sample":
            self.offloader.onload(ENGINE)
            assert not (self.fresh and self.replay.refused("sample")), "weights that were to be kept are lost"
            self.replay.do("sample")
        else:
            self.offloader.onload(action)
            assert "kv_cache" in self.replay.fake.sleeping

    def way_back(self):
        for action in ("sync", "sample"):
            self.do(action)


def settled(replay):
    """The state once it has stayed the same: the engine's own thread may still be at work."""
    states = [replay.state]
    while len(states) < 4 or len(set(states[-4:])) > 1:
        time.sleep(0.005)
        states.append(replay.state)
    return states[-1]


def explore(start, actions):
    """Go on once from every state there is, with every action; how many states."""

    def play(order):
        replay = start()
        try:
            for action in order:
                replay.do(action)
            state = settled(replay)
            replay.way_back()
        except BaseException as error:
            error.add_note(f"order: {', '.join(order)}, and the way back")
            raise
        finally:
            replay.engine.close()
        return state

    seen, ends = {play(())}, [()]
    for order in ends:
        for action in actions:
            state = play((*order, action))
            if state not in seen:
                seen.add(state)
                ends.append((*order, action))
    return len(seen)
