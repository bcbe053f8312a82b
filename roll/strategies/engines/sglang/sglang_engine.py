"""SGLang behind `AsyncEngine`: a process with the engine in it (`host.py`), and what is said to it.

Weights. A session of SGLang (`begin`, buckets, `end`), then its prefix cache is emptied. Every answer is looked at:
SGLang tells of a refused update in what it returns, and would go on with the old weights. Buckets are memory that all
ranks open (`buckets.py`), of the host or, where they can, of the accelerator that the weights are on.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import pickle
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import roll
from roll.configs.catalog.family_table import family_of
from roll.configs.rules.rotations_rules import rotation_obstacle
from roll.configs.schema.engine_config import SGLANG_COLDEST, SglangConfig
from roll.configs.schema.worker_config import ModelArgs
from roll.strategies.base import EnginePart, EngineSettings, Request, RequestRefused, SamplingParams
from roll.strategies.engines.async_engine import AsyncEngine, started
from roll.strategies.engines.buckets import SharedBucket
from roll.strategies.engines.engine_backend import EngineBackend, Sampled
from roll.strategies.engines.engine_processes import MARK, kill_marked
from roll.strategies.engines.responses import ResponseRules
from roll.strategies.engines.sglang.sglang_channel import LENGTH, REFUSED, START_CALL, frame
from roll.strategies.engines.sglang.sglang_loader import LOADER
from roll.strategies.hf.description import ModelDescription, describe_model
from roll.strategies.training.pretrained import load_config, weights_folder
from roll.utils.loop_thread import settle

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_MARGIN = 8  # positions that SGLang keeps free at the end of its context; it gets more, so that responses can fill ours
_TOKENS_PER_MESSAGE = 256  # of a response that nobody looks at before its end; its first token and its end come at once

_CPU_ARGUMENTS = {"device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch"}
_CPU_DEFAULTS = {
    "CUDA_VISIBLE_DEVICES": "",
    "SGLANG_USE_CPU_ENGINE": "1",
    # Ranks of one engine draw each for itself; here nothing else makes them agree.
    "SYNC_TOKEN_IDS_ACROSS_TP": "1",
    # Compiling takes a minute; what would be compiled takes microseconds.
    "TORCHDYNAMO_DISABLE": "1",
}
_DEFAULTS = {"TOKENIZERS_PARALLELISM": "false", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}


def build(args: ModelArgs, options: SglangConfig, settings: EngineSettings) -> AsyncEngine:
    """Start one engine with its processes; blocks until it can take requests.

    Raises:
        ValueError: SGLang isn't installed, or the model can't be described.
        EngineDied: the engine didn't come up.
    """
    if importlib.util.find_spec("sglang") is None:
        raise ValueError("strategy sglang needs the package sglang, which isn't installed")
    if str(args.model_name_or_path).endswith(".gguf"):
        raise ValueError(f"sglang can't take weights of a GGUF file, {args.model_name_or_path}; convert it to a folder")
    description = describe_model(args)
    config = load_config(args).get_text_config()
    if not family_of(description.model_type).sglang_ties_head and config.tie_word_embeddings:
        raise ValueError(
            f"sglang can't run {args.model_name_or_path}: its head is its embeddings (tie_word_embeddings), but SGLang "
            f"has a head of its own in models of type {description.model_type}, which would get no weights"
        )
    if why := rotation_obstacle("sglang", config.to_dict(), settings.max_sequence_length):
        raise ValueError(f"sglang can't sample from {args.model_name_or_path}: {why}. Use vllm or hf_infer")
    length = min(settings.max_sequence_length, description.max_context)
    on_cpu = not torch.cuda.is_available()
    arguments = {
        "model_path": weights_folder(args),
        "dtype": _DTYPES[args.dtype],
        "trust_remote_code": args.trust_remote_code,
        "json_model_override_args": json.dumps(dict(args.model_config_kwargs)),
        "random_seed": settings.seed % (1 << 31),
        "context_length": length + _MARGIN,
        "max_running_requests": settings.max_running_requests,
        "enable_memory_saver": not on_cpu,
        "skip_tokenizer_init": True,
        "incremental_streaming_output": True,
        "grammar_backend": "none",
        "sampling_mask_max_tokens": config.vocab_size,
        "log_level": "error",
        # Without a limit SGLang takes a share of the machine's memory.
        **(
            {**_CPU_ARGUMENTS, "max_total_tokens": settings.max_running_requests * (length + _MARGIN)} if on_cpu else {}
        ),
        **options.declared_arguments,
        **options.engine_args,
    }
    arguments["custom_weight_loader"] = [*(arguments.get("custom_weight_loader") or ()), LOADER]
    backend = SglangBackend(
        {key: value for key, value in arguments.items() if value is not None},
        description,
        vocab_size=config.vocab_size,
        environment=_cpu_environment(options.devices) if on_cpu else {},
        update_buffer_bytes=settings.update_buffer_bytes,
    )
    rules = ResponseRules(description.eos_token_ids, length, description.decode, description.vocab_size)
    return started(AsyncEngine, backend, rules, settings, "SGLang engine")


def _cpu_environment(num_ranks: int) -> dict[str, str]:
    """Return what SGLang needs to run without an accelerator: each rank its own cores, if there are several."""
    if num_ranks == 1:
        return dict(_CPU_DEFAULTS)
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[rank * len(cores) // num_ranks :][: max(1, len(cores) // num_ranks)] for rank in range(num_ranks)]
    return {**_CPU_DEFAULTS, "SGLANG_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, share)) for share in shares)}


class SglangBackend(EngineBackend):
    """One `sgl.Engine`, made with `arguments`.

    `environment` holds defaults of the engine's environment variables: what is set outside wins.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        description: ModelDescription,
        *,
        vocab_size: int,
        environment: Mapping[str, str] | None = None,
        update_buffer_bytes: int = 256 << 20,
    ) -> None:
        self._arguments = dict(arguments)
        self._description = description
        self._vocab_size = vocab_size
        self._environment = dict(environment or {})
        self._update_buffer_bytes = update_buffer_bytes
        self._mark = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._dead: BaseException | None = None
        self._ends: frozenset[int] = frozenset()
        """Tokens at which SGLang ends a response by itself."""
        self._num_calls = START_CALL
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_streams = 0
        self._rids: dict[str, str] = {}
        self._streams: dict[str, asyncio.Queue[tuple[Any, ...]]] = {}

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._start_host(theirs)
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._reading = asyncio.create_task(self._read(reader))
        started = self._expect(START_CALL)
        self._writer.write(frame(("start", {**self._arguments, "nccl_port": _free_port()})))
        self._ends = frozenset(token for token in await started if token < self._vocab_size)

    def _start_host(self, connection: socket.socket) -> None:
        # A session of its own: the host ends its whole group when this process is gone, however that happens.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "roll.strategies.engines.sglang.host", str(connection.fileno())],
            pass_fds=[connection.fileno()],
            stdin=subprocess.DEVNULL,
            env=self._child_environment(),
            start_new_session=True,
        )

    def _child_environment(self) -> dict[str, str]:
        environment = {**_DEFAULTS, **self._environment, **os.environ, MARK: self._mark}
        package = str(Path(roll.__file__).parents[1])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), package]))
        return environment

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hand what the host says to who waits for it; at the end of the connection, tell everyone."""
        try:
            while True:
                (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                kind, key, *content = pickle.loads(await reader.readexactly(size))
                if kind == "sampled" and key in self._streams:
                    self._streams[key].put_nowait(tuple(content))
                elif kind == "answer" and key in self._calls:
                    value, wrong = content
                    settle(self._calls.pop(key), value, RuntimeError(wrong) if wrong else None)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._mark_dead()

    def _mark_dead(self) -> None:
        self._dead = RuntimeError("SGLang's processes have ended; what they printed before says why")
        for future in self._calls.values():
            settle(future, None, self._dead)
        for queue in self._streams.values():
            queue.put_nowait(((), (), "abort", str(self._dead)))

    def _expect(self, number: int) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        return future

    def _send(self, message: tuple[Any, ...]) -> None:
        if self._dead is not None:
            raise self._dead
        assert self._writer is not None, "the engine hasn't been started"
        self._writer.write(frame(message))

    async def _call(self, name: str, *arguments: Any) -> Any:
        self._num_calls += 1
        number = self._num_calls
        answer = self._expect(number)
        try:
            self._send(("call", number, name, arguments))
            return await answer
        finally:
            self._calls.pop(number, None)

    def check(self, request: Request) -> None:
        if request.params.repetition_penalty != 1.0:
            raise ValueError(
                f"request {request.id!r} has repetition_penalty {request.params.repetition_penalty}; SGLang penalises "
                "sampled tokens only, not those of the prompt as other engines do: set it to 1, or use another engine"
            )
        if 0 < request.params.temperature < SGLANG_COLDEST:
            raise ValueError(
                f"request {request.id!r} has temperature {request.params.temperature}; SGLang takes 0 (greedy) and "
                f"{SGLANG_COLDEST:g} or more: below it is greedy, and tells log-probs at temperature 1"
            )

    async def stream(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, seed: int, *, final_only: bool
    ) -> AsyncGenerator[Sampled, None]:
        """Sample one response; `seed` is ignored, as SGLang does."""
        del seed
        # SGLang aborts every request whose id begins with the one it is told: all ids have one length.
        self._num_streams += 1
        rid = f"{self._num_streams:016x}"
        stops = self._ends <= set(params.stop_token_ids)
        cut = params.temperature > 0 and (params.top_p < 1 or params.top_k > 0)
        sampling = {
            "max_new_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            # SGLang tells probabilities in a distribution cut by top-p only along with a top-k; this one cuts nothing.
            "top_k": self._vocab_size if cut and params.top_k < 1 else params.top_k,
            "stop_token_ids": list(params.stop_token_ids),
            # With it SGLang looks for no token at all: only where a token of the model's own wouldn't be an end here.
            "ignore_eos": not stops,
            # Each message costs this process and the engine's far more than the tokens in it; but a token that SGLang
            # doesn't look for is seen here.
            "stream_interval": _TOKENS_PER_MESSAGE if final_only and (stops or not params.stop_token_ids) else 1,
        }
        queue: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        self._streams[rid], self._rids[request_id] = queue, rid
        ended = None
        try:
            self._send(("generate", rid, tuple(prompt_ids), sampling, cut))
            while ended is None:
                tokens, logprobs, ended, wrong = await queue.get()
                if wrong:
                    raise RequestRefused(wrong) if ended == REFUSED else RuntimeError(wrong)
                yield Sampled(tokens, logprobs, ended)
        finally:
            del self._streams[rid], self._rids[request_id]
            if ended is None and self._dead is None:
                self._send(("abort", [rid]))

    async def abort_running(self, request_ids: Sequence[str]) -> None:
        rids = [self._rids[i] for i in request_ids if i in self._rids]
        if rids:
            self._send(("abort", rids))

    async def load(self, version: int, weights: AsyncIterator[tuple[str, Tensor]]) -> None:
        await self._call("begin")
        bucket = SharedBucket(self._description.bucket_bytes(self._update_buffer_bytes), self._opens)
        try:
            async for path, entries, _ in bucket.fill(self._description.checkpoint(weights)):
                await self._call("bucket", path, entries)
        finally:
            bucket.close()
        await self._call("end", version)

    async def _opens(self, path: str) -> bool:
        return bool(await self._call("opens", path))

    async def sleep(self, parts: Sequence[EnginePart]) -> int:
        return int(await self._call("release", list(parts)))

    async def wake(self, parts: Sequence[EnginePart]) -> None:
        await self._call("resume", list(parts))

    async def health(self) -> None:
        if self._dead is None and self._process is not None and self._process.poll() is not None:
            self._mark_dead()
        if self._dead is not None:
            raise self._dead

    async def shutdown(self) -> None:
        if self._dead is None and self._writer is not None and self._num_calls > START_CALL:
            with contextlib.suppress(RuntimeError):
                await self._call("shutdown")
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()

    def kill(self) -> None:
        kill_marked(self._mark)
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)


def _free_port() -> int:
    """Return a port that nobody uses now: engines that start at once would find the same one by themselves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
