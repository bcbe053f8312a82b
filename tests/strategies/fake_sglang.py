"""A stand-in for `sglang.Engine` that holds its caller to SGLang 0.5.23's rules of memory, weights and requests, and a
backend whose host (`sglang/host.py`) runs with it in a thread of this process.

Rules: `SchedulerWeightUpdaterManager` (what it asserts, and which memory it touches), torch_memory_saver (ends the
process for memory that is away already, or there already), `TokenizerManager` (an update waits for requests and they
for it; an abort is sent once, and lost if it overtakes its request) and `event_loop_pp` (stages after the first one
work on after the answer). Weights go through our own loader, and tokens say which weights they were drawn under.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import pickle
import sys
import threading
from types import SimpleNamespace

import torch
from engine_orders import BUCKETS, LONG, Illegal

from roll.strategies.engines.sglang import host, sglang_channel
from roll.strategies.engines.sglang import sglang_engine as engine
from roll.strategies.engines.sglang import sglang_loader as loader

# For good: the thread of a host may outlive the test, and would kill its whole process group.
host._end_with_everything = lambda: None

ALL = {"weights", "kv_cache", "cuda_graph"}
LATER = 0.01  # seconds after which a later pipeline stage does what the first one has done


class Rank:
    """A scheduler process: a model, and a loader module of its own."""

    def __init__(self, number):
        spec = importlib.util.spec_from_file_location("roll.strategies.engines.sglang.sglang_loader", loader.__file__)
        self.loader = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.loader)
        self.loader.answer = functools.partial(sglang_channel.answer, worker=number)
        self.parameter = torch.nn.Parameter(torch.zeros(1))
        self.weights = {"w": torch.zeros(4)}
        self.skips = False  # whether it has a parameter that it never loads

    def parameters(self):
        return iter([self.parameter])

    def named_parameters(self):
        return iter([("skipped", self.parameter)] if self.skips else [])

    def load_weights(self, tensors):
        self.weights.update((name, tensor.clone()) for name, tensor in tensors)

    def load(self, payload):
        self.loader.load(self, pickle.loads(payload))


class FakeSglang:
    """The engine and its tokenizer manager."""

    def __init__(self, **arguments):
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = self
        self.model_config = SimpleNamespace(hf_eos_token_id={99})
        self.arguments = arguments
        width, depth = arguments["tp_size"], arguments.get("pp_size", 1)
        self.stages = [[Rank(stage * width + rank) for rank in range(width)] for stage in range(depth)]
        self.rid_to_state = {}
        self.sleeping = set()
        self.lost = False  # weights that were given back and that nobody has loaded since
        self.session = False
        self.inside = set()  # requests that hold up a weight update
        self.running = {}
        self.busy = False  # the last batch counts until the scheduler has looked again
        self.cached = False  # keys and values of other weights
        self.updating = asyncio.Lock()
        self.illegal = []

    @property
    def state(self):
        readers = sum(len(rank.loader._readers) for rank in self.ranks)
        flags = self.lost, self.session, self.busy, self.cached, readers
        return frozenset(self.sleeping), len(self.running), len(self.rid_to_state), flags

    @property
    def ranks(self):
        return [rank for stage in self.stages for rank in stage]

    def _need(self, true, what):
        if not true:
            self.illegal.append(what)
            raise Illegal(what)

    # Requests.

    async def generate_request(self, request, http):
        self._need(request.rid not in self.rid_to_state, "two requests of one id")
        self.rid_to_state[request.rid] = SimpleNamespace(abort_sent=False)
        ended = asyncio.Event()
        try:
            async with self.updating:
                self.inside.add(request.rid)
            await asyncio.sleep(0)  # on its way to the scheduler: an abort doesn't find it there
            self.running[request.rid] = ended
            self.busy = True
            self._need(not self.sleeping, "a response without weights or cache")
            self._need(not self.lost, "a response from weights that were given back")
            self._need(not self.session, "a response during a weight update")
            self._need(not self.cached, "a response with keys and values of other weights")
            if request.sampling_params["max_new_tokens"] >= LONG:
                await ended.wait()
                yield _output([], "abort")
            else:
                tokens = {int(rank.weights["w"][0]) for rank in self.ranks}
                self._need(len(tokens) == 1, "ranks with different weights")
                yield _output(list(tokens), "length")
        finally:
            del self.rid_to_state[request.rid]
            self.inside.discard(request.rid)
            self.running.pop(request.rid, None)

    def abort_request(self, rid):
        state = self.rid_to_state.get(rid)
        if state is None or state.abort_sent:
            return
        state.abort_sent = True
        if rid in self.running:
            self.running[rid].set()

    # Weights. Every call waits until no request is inside.

    async def _alone(self):
        while self.inside:
            await asyncio.sleep(0)

    async def begin_weight_update(self, request, http):
        async with self.updating:
            await self._alone()
            self._need("weights" not in self.sleeping, "weights restored that are away")
            if self.session:
                return False, "a weight-update session is already open"
            self.session, self.loaded = True, False
            return True, ""

    async def update_weights_from_tensor(self, request, http):
        async with self.updating:
            await self._alone()
            if not self.session:
                return False, "must run between begin_weight_update() and end_weight_update()"
            self._need("weights" not in self.sleeping, "weights loaded into memory that is away")
            self._need(request.load_format in self.arguments["custom_weight_loader"], "an unknown load_format")
            payloads = request.serialized_named_tensors
            for number, stage in enumerate(self.stages):
                for rank, payload in zip(stage, payloads, strict=True):
                    self.loop.call_later(number * LATER, rank.load, payload) if number else rank.load(payload)
            self.loaded = self.cached = True
            return True, ""

    async def end_weight_update(self, request, http):
        async with self.updating:
            await self._alone()
            if not self.session:
                return False, "no weight-update session is open"
            self._need(self.loaded, "an update without weights")
            self.session = self.lost = False
            return True, ""

    async def update_weight_version(self, request):
        self._need(not request.abort_all_requests, "requests that wait are aborted")

    # Memory.

    async def flush_cache(self, timeout_s=None):
        while timeout_s and self.running:
            await asyncio.sleep(0)
        idle = not self.running and (timeout_s is not None or not self.busy)
        if idle:
            self.busy = self.cached = False
        return SimpleNamespace(success=idle, message="")

    async def release_memory_occupation(self, request, http):
        self._need(not self.running and not self.busy, "release_memory_occupation while the scheduler isn't idle")
        self._need(not self.session, "memory given back during a weight update")
        tags = set(request.tags or ALL)
        self._need(not tags & self.sleeping, f"{tags & self.sleeping} are away already")
        self.sleeping |= tags
        if "weights" in tags:
            self.lost = True
        if "kv_cache" in tags:
            self.cached = False

    async def resume_memory_occupation(self, request, http):
        tags = set(request.tags or ALL)
        self._need(tags <= self.sleeping, f"{tags - self.sleeping} are there already")
        self.sleeping -= tags

    def shutdown(self):
        self.loop.stop()


def _output(tokens, reason):
    meta = {"finish_reason": {"type": reason}, "output_token_logprobs": [(-1.0, token, None) for token in tokens]}
    return {"output_ids": tokens, "meta_info": meta}


class Host(host._Host):
    """A thread, which ends quietly when its owner is gone."""

    def _read(self):
        with contextlib.suppress(EOFError, OSError):
            super()._read()


class Backend(engine.SglangBackend):
    """SGLang's backend and host with the stand-in for its engine, and no processes."""

    def __init__(self, bucket_bytes=4096, **arguments):
        arguments = {"tp_size": 1, "custom_weight_loader": [loader.LOADER], **arguments}
        super().__init__(arguments, BUCKETS, vocab_size=100, update_buffer_bytes=bucket_bytes)

    def _start_host(self, connection):
        self.host = Host(connection.dup())
        self.thread = threading.Thread(target=self.host.run, daemon=True)
        self.thread.start()

    @property
    def fake(self):
        return self.host._engine

    def kill(self):
        if self.thread.is_alive():
            self.fake.loop.call_soon_threadsafe(self.fake.loop.stop)
            self.thread.join(5)
        self.fake.loop.close()


def install(monkeypatch):
    """Put the stand-in in SGLang's place, on a machine with an accelerator of which it uses a byte per part."""
    made = []

    def start(**arguments):
        made[:] = [FakeSglang(**arguments)]
        return made[0]

    names = ("BeginWeightUpdate", "UpdateWeightsFromTensor", "EndWeightUpdate", "UpdateWeightVersion", "Generate")
    names += ("ReleaseMemoryOccupation", "ResumeMemoryOccupation")
    requests = SimpleNamespace(**{f"{name}ReqInput": SimpleNamespace for name in names})
    modules = {
        "sglang": SimpleNamespace(Engine=start, __version__="0.5.23"),
        "sglang.srt.managers": SimpleNamespace(io_struct=requests),
        "sglang.srt.managers.io_struct": requests,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda device: len(ALL - made[0].sleeping))
