"""A stand-in for vLLM's `AsyncLLM` that holds its caller to vLLM 0.32's rules of sleeping, waking and loading weights.

Rules: `EngineCore.sleep`, `wake_up` and `release_kv_cache_memory`, `Executor.sleep` and `wake_up` (they only warn and
do nothing where this raises), and `Worker.start_weight_update`. Tokens say which weights they were drawn under.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from engine_orders import LONG, Illegal

ALL = {"weights", "kv_cache"}


class FakeAsyncLLM:
    def __init__(self):
        self.sleeping = set()
        self.paused = False
        self.lost = False  # weights that a level 2 sleep threw away and that nobody has loaded since
        self.updating = False
        self.version = 0
        self.running = {}
        self.unpaused = asyncio.Event()
        self.unpaused.set()
        self.illegal = []

    @property
    def state(self):
        return frozenset(self.sleeping), self.paused, self.lost, self.updating, len(self.running)

    def _need(self, true, what):
        if not true:
            self.illegal.append(what)
            raise Illegal(what)

    def _pause(self):
        self.paused = True
        self.unpaused.clear()
        for ended in self.running.values():
            ended.set()

    async def resume_generation(self):
        self._need(not self.sleeping, "the scheduler runs while memory is away")
        self.paused = False
        self.unpaused.set()

    async def pause_generation(self, mode):
        self._need(mode == "abort", "requests outlive a pause")
        self._pause()

    async def sleep(self, level):
        self._need("weights" not in self.sleeping, "sleep: vLLM is asleep already, and would free nothing")
        self._pause()
        self._need(not self.running, "sleep with requests under way")
        self.sleeping |= ALL
        self.lost = self.lost or level == 2

    async def release_kv_cache_memory(self):
        self._need(self.paused and not self.running, "release_kv_cache_memory without a completed pause")
        self._need(not self.sleeping, "release_kv_cache_memory with memory away")
        self.sleeping.add("kv_cache")

    async def wake_up(self, tags):
        self._need(tags and set(tags) <= self.sleeping, f"wake_up {tags}: one is awake, and vLLM would wake none")
        self.sleeping -= set(tags)
        if not self.sleeping:
            await self.resume_generation()

    async def start_weight_update(self):
        self._need(not self.updating, "two weight updates at once")
        self._need("weights" not in self.sleeping, "weights loaded into memory that is away")
        self._need(self.paused and not self.running, "weights loaded while requests run")
        self.updating = True

    async def update_weights(self, request):
        self._need(self.updating and request.update_info["entries"], "a bucket outside a weight update")

    async def finish_weight_update(self, weight_version):
        self._need(self.updating, "the end of a weight update that never began")
        self.updating, self.lost, self.version = False, False, int(weight_version)

    async def reset_prefix_cache(self):
        return not self.running

    async def abort(self, ids):
        for name in ids:
            if name in self.running:
                self.running[name].set()

    async def generate(self, prompt, sampling, request_id, lora_request):
        ended = self.running[request_id] = asyncio.Event()
        try:
            await self.unpaused.wait()
            self._need(not self.sleeping, "a response without weights or cache")
            self._need(not self.lost, "a response from weights that were thrown away")
            if sampling["max_tokens"] >= LONG:
                await ended.wait()
                yield _output([], "abort")
            else:
                yield _output([self.version], "length")
        finally:
            self.running.pop(request_id, None)

    async def collective_rpc(self, method):
        assert method == "free_device_memory"
        return [len(self.sleeping)]

    async def check_health(self):
        pass

    def shutdown(self):
        pass


def _output(tokens, reason):
    flat = SimpleNamespace(start_indices=range(len(tokens)), token_ids=tokens, logprobs=[-1.0] * len(tokens))
    part = SimpleNamespace(token_ids=tokens, logprobs=flat, finish_reason=reason, routed_experts=None)
    return SimpleNamespace(outputs=[part])
