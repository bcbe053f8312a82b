"""vLLM's `AsyncLLM` behind `AsyncEngine`, through its public interface only.

Weights. `pause_generation` empties the scheduler, `start_weight_update` puts the layers into loadable form, buckets go
to the worker processes through shared memory (`buckets.py` here, `transfer.py` there), `finish_weight_update` packs the
layers and names the version, the prefix cache is emptied, `resume_generation`. A failure anywhere ends the engine.

Adapters. With a `lora_rank` the weights are those of the base model, and adapters come by themselves: written into a
folder that lives until `add_lora` has read it. Each version is an adapter with a name of its own, which requests give,
and the only one that the engine holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import itertools
import logging
import os
import tempfile
import threading
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roll.configs.catalog.family_table import family_of
from roll.configs.checks.machine_checks import MISSING
from roll.configs.checks.vllm_models import TOWER_ADAPTERS, delta_rule_obstacle, head_obstacle, import_obstacle
from roll.configs.rules.rotations_rules import rotation_obstacle
from roll.configs.schema.engine_config import VLLM_LORA_RANKS, VllmConfig
from roll.configs.schema.model_shape import shape_of
from roll.configs.schema.worker_config import ModelArgs
from roll.distributed.byte_account import count_copied
from roll.distributed.transports.bucket_layout import entry_bytes
from roll.strategies.base import ENGINE_PARTS, EnginePart, EngineSettings, Request, RequestRefused, SamplingParams
from roll.strategies.engines.async_engine import AsyncEngine, started
from roll.strategies.engines.buckets import SharedBucket, on_device
from roll.strategies.engines.engine_backend import AdapterBackend, EngineBackend, Sampled
from roll.strategies.engines.engine_processes import MARK, OWNER, kill_marked
from roll.strategies.engines.responses import ResponseRules
from roll.strategies.engines.vllm.vllm_adapters import AdapterEngine, AdapterFiles
from roll.strategies.hf.description import ModelDescription, describe_model
from roll.strategies.training.pretrained import load_config, weights_folder
from roll.types.trajectory import FinishReason
from roll.utils.loop_thread import settle
from roll.utils.processor import this_processor

logger = logging.getLogger(__name__)

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_CPU_KV_CACHE = 2 << 30
"""Bytes of KV cache on a CPU unless the user says otherwise; vLLM would take a share of the machine's memory."""
_TEMPERATURES = (0.01, 2.0)  # what vLLM takes; below it would sample from another distribution than was asked for
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}

_DEFAULTS = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
_CPU_DEFAULTS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Several engines and trainers share the cores here; bound threads would all sit on the same ones."""

_ONLINE = {"fp8": "fp8_per_tensor", "int8": "int8_per_channel_weight_only"}
"""What to call it when the engine quantises the weights it gets. By `fp8` vLLM means files that hold fp8 already."""


def build(args: ModelArgs, options: VllmConfig, settings: EngineSettings) -> AsyncEngine:
    """Start one engine with its processes; blocks until it can take requests.

    Raises:
        ValueError: vLLM isn't installed or refuses an option.
        EngineDied: the engine didn't come up.
    """
    if str(args.model_name_or_path).endswith(".gguf"):
        raise ValueError(f"vllm can't take weights of a GGUF file, {args.model_name_or_path}; convert it to a folder")
    description = describe_model(args)
    tree, cannot = load_config(args).get_text_config().to_dict(), f"vllm can't sample from {args.model_name_or_path}"
    adapters, of_picture_model = args.lora_rank > 0, description.language is not None
    if why := _obstacle(tree, args):
        raise ValueError(f"{cannot}: {why}")
    if adapters and of_picture_model:
        raise ValueError(f"{cannot}: {TOWER_ADAPTERS}. Write lora_sync: merged")
    if why := rotation_obstacle("vllm", tree, settings.max_sequence_length, options.max_model_len):
        raise ValueError(f"{cannot}: {why}. Remove max_model_len")
    length = min(options.max_model_len or settings.max_sequence_length, description.max_context)
    changes: dict[str, Any] = dict(args.model_config_kwargs)
    if of_picture_model:  # where vLLM looks for what its head is tied by, and not where transformers does
        changes = {"text_config": {"tie_word_embeddings": tree["tie_word_embeddings"], **changes}}
    level = options.level_of_sleep(adapters=adapters)
    arguments = {
        **options.declared_arguments,
        "model": weights_folder(args),
        "dtype": _DTYPES[args.dtype],
        "trust_remote_code": args.trust_remote_code,
        "hf_overrides": changes,
        "language_model_only": True if of_picture_model else None,
        "seed": settings.seed % (1 << 31),
        "max_model_len": length,
        "max_num_seqs": options.max_num_seqs or settings.max_running_requests,
        "enforce_eager": not torch.cuda.is_available() if options.enforce_eager is None else options.enforce_eager,
        "quantization": _ONLINE.get(options.quantization or "", options.quantization),
        "enable_sleep_mode": level > 0 and torch.cuda.is_available(),
        **options.engine_args,
    }
    if settings.return_routed_experts:  # nothing else: unasked, an older vLLM needn't have the argument
        arguments["enable_return_routed_experts"] = True
    recurrent = shape_of(tree).attending < 1
    seeds = torch.cuda.is_available() or _whole_prompts(arguments, length, recurrent=recurrent)
    if options.devices > 1:
        arguments["distributed_executor_backend"] = "mp"  # inside a Ray actor vLLM would start actors of its own
    if adapters:
        room = next((size for size in VLLM_LORA_RANKS if size >= args.lora_rank), None)
        if room is None:
            raise ValueError(f"vLLM takes adapters up to rank {VLLM_LORA_RANKS[-1]}, these have {args.lora_rank}")
        arguments |= {"enable_lora": True, "max_lora_rank": room, "max_loras": 1, "max_cpu_loras": 1}
    made: Callable[..., VllmBackend] = (
        functools.partial(VllmAdapterBackend, args.lora_rank) if adapters else VllmBackend
    )
    backend = made(
        {key: value for key, value in arguments.items() if value is not None},
        description,
        sleep_level=level,
        update_buffer_bytes=settings.update_buffer_bytes,
        seeds=seeds,
    )
    rules = ResponseRules(description.eos_token_ids, length, description.decode, description.vocab_size)
    return started(AdapterEngine if adapters else AsyncEngine, backend, rules, settings, "vLLM engine")


def _obstacle(tree: Mapping[str, Any], args: ModelArgs) -> str:
    """Return why vLLM can't sample from the model with this config.json here; empty: it can, or nobody can tell."""
    if not torch.cuda.is_available():
        if why := head_obstacle(tree):
            return f"{why}. Use hf_infer or sglang"
        features = this_processor().features
        if why := delta_rule_obstacle(tree, args.dtype, features, adapters=args.lora_rank > 0):
            return f"{why}. Use hf_infer"
    package = family_of(tree.get("model_type")).vllm_imports
    try:
        if package is not None:
            importlib.import_module(package)
    except Exception as error:  # noqa: BLE001 - of a build that doesn't fit torch's, which raises whatever it raises
        return f"{import_obstacle(tree, package or '')}: {error}. {MISSING[package or '']}"
    return ""


def _whole_prompts(arguments: dict[str, Any], length: int, *, recurrent: bool = False) -> bool:
    """Make vLLM on a CPU read every prompt in one pass unless something else was asked for; whether it will.

    When vLLM 0.32 cuts the prompt of a response with a seed, it rewinds the generator, which one on a CPU can't do: the
    engine dies. So responses only get their seeds when no prompt is cut. The prefix cache of a model with `recurrent`
    layers cuts prompts where it keeps a state, and is off then.
    """
    budget = arguments.get("max_num_batched_tokens")
    if arguments.get("enable_chunked_prefill") is None and (budget is None or budget >= length):
        arguments["enable_chunked_prefill"] = False
    if arguments.get("enable_chunked_prefill") is False:
        if recurrent:
            arguments["enable_prefix_caching"] = False
        return True
    logger.warning("vLLM on a CPU can't both cut prompts and give each response its own seed: responses don't repeat")
    return False


class VllmBackend(EngineBackend):
    """One `AsyncLLM`, made with `arguments` and what this class itself needs.

    `sleep_level` is that of `VllmConfig`. `seeds`: each response draws from its own seed.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        description: ModelDescription,
        *,
        sleep_level: int = 0,
        update_buffer_bytes: int = 256 << 20,
        seeds: bool = True,
    ) -> None:
        self._arguments = dict(arguments)
        self._seeds = seeds
        self._description = description
        self._sleep_level = sleep_level
        self._update_buffer_bytes = update_buffer_bytes
        self._adapter: Any = None  # what a request names to be sampled with the adapters of the current version
        # Some of vLLM's loaders write to what they are given, on all ranks but the first.
        self._loads_in_place = not torch.cuda.is_available() and (arguments.get("tensor_parallel_size") or 1) == 1
        self._mark = uuid.uuid4().hex
        self._engine: Any = None
        self._params: Any = None
        self._client_errors: tuple[type[Exception], ...] = (ValueError,)  # raised for a request that isn't right
        self._asleep: set[EnginePart] = set()
        self._freed: set[EnginePart] = set()  # what of that vLLM itself has put to sleep

    async def start(self) -> None:
        on_cpu = not torch.cuda.is_available()
        defaults = {**_DEFAULTS, **(_CPU_DEFAULTS if on_cpu else {})}
        with _environment(defaults, {MARK: self._mark, OWNER: str(os.getpid())}):
            try:
                from vllm import SamplingParams as VllmParams
                from vllm.config import WeightTransferConfig
                from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
                from vllm.engine.arg_utils import AsyncEngineArgs
                from vllm.exceptions import VLLMClientError
                from vllm.sampling_params import RequestOutputKind
                from vllm.usage.usage_lib import UsageContext
                from vllm.v1.engine.async_llm import AsyncLLM
            except ImportError as error:
                raise ValueError(f"strategy vllm needs the package vllm, which can't be imported: {error}") from error
            if on_cpu and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
                self._arguments.setdefault("kv_cache_memory_bytes", _CPU_KV_CACHE)
            arguments = {
                **self._arguments,
                "skip_tokenizer_init": True,
                "generation_config": "vllm",  # sampling is what requests say, and nothing else
                "logprobs_mode": "processed_logprobs",
                "weight_transfer_config": WeightTransferConfig(backend="host"),
                "worker_extension_cls": "roll.strategies.engines.vllm.transfer.WorkerExtension",
                "disable_log_stats": True,
            }
            known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
            unknown = sorted(set(arguments) - known)
            if unknown:
                raise ValueError(f"the installed vLLM has no argument {', '.join(map(repr, unknown))}")
            # The default context has no place in vLLM's table of defaults: on an H100 a pass would read 2,048 prompt
            # tokens instead of 16,384.
            self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS)
        self._client_errors = (ValueError, VLLMClientError)
        self._params = lambda final_only, **given: VllmParams(
            n=1,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY if final_only else RequestOutputKind.DELTA,
            **given,
        )
        await self._engine.init_weight_transfer_engine(WeightTransferInitRequest())

    def check(self, request: Request) -> None:
        low, high = _TEMPERATURES
        temperature = request.params.temperature
        if temperature != 0 and not low <= temperature <= high:
            raise ValueError(
                f"request {request.id!r} has temperature {temperature}; vllm takes 0 (greedy) and {low} to {high}"
            )

    async def stream(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, seed: int, *, final_only: bool
    ) -> AsyncGenerator[Sampled, None]:
        with self._refusing():
            sampling = self._params(
                final_only,
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=max(params.top_k, 0),
                repetition_penalty=params.repetition_penalty,
                max_tokens=params.max_new_tokens,
                stop_token_ids=list(params.stop_token_ids),
                ignore_eos=True,
                seed=seed if self._seeds else None,
            )
        if not final_only and self._arguments.get("enable_return_routed_experts"):
            _warn_of_stop_strings()
        prompt = {"prompt_token_ids": list(prompt_ids)}
        read = len(prompt_ids) - 1  # the last token is never read
        outputs = self._engine.generate(prompt, sampling, request_id, lora_request=self._adapter)
        async with contextlib.aclosing(self._refusals(outputs)) as heard:
            async for output in heard:
                (part,) = output.outputs
                tokens, logprobs = list(part.token_ids), drawn_logprobs(part.token_ids, part.logprobs)
                ended = part.finish_reason
                if ended is not None and ended not in _REASONS:
                    raise RuntimeError(f"vLLM ended request {request_id!r} with {ended!r}")
                read += len(tokens)
                experts = sampled_experts(part.routed_experts, read, complete=ended != "abort")
                yield Sampled(tokens, logprobs, None if ended is None else _REASONS[ended], experts)

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except self._client_errors as error:
            raise RequestRefused(f"vLLM refuses it: {error}") from error

    async def _refusals(self, outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """Yield vLLM's outputs; raises `RequestRefused` where it says that the request isn't right."""
        async with contextlib.aclosing(outputs):
            with self._refusing():
                async for output in outputs:
                    yield output

    async def abort_running(self, request_ids: Sequence[str]) -> None:
        await self._engine.abort(list(request_ids))

    async def load(self, version: int, weights: AsyncIterator[tuple[str, Tensor]]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        engine = self._engine
        await engine.pause_generation(mode="abort")
        await engine.start_weight_update()
        bucket = SharedBucket(self._description.bucket_bytes(self._update_buffer_bytes), self._opens)
        try:
            async for path, entries, stays in bucket.fill(self._description.checkpoint(weights)):
                in_place = stays and self._loads_in_place
                info = {"path": path, "entries": entries, "in_place": in_place}
                await engine.update_weights(WeightTransferUpdateRequest(update_info=info))
                if not in_place and not on_device(path):
                    count_copied(sum(map(entry_bytes, entries)))  # by the workers, see transfer.py
        finally:
            bucket.close()
        await engine.finish_weight_update(weight_version=str(version))
        await self._resume()

    async def _resume(self) -> None:
        # Keys and values of the old weights: nothing may read them.
        if not await self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM couldn't empty its prefix cache after the weight update")
        if not self._freed:  # else vLLM goes on by itself once all its memory is back, and mustn't before
            await self._engine.resume_generation()

    async def sleep(self, parts: Sequence[EnginePart]) -> int:
        """Sleep; vLLM frees both parts at once, or the KV cache alone while it is awake."""
        self._asleep.update(parts)
        wanted = self._asleep if len(self._asleep) == len(ENGINE_PARTS) else self._asleep & {"kv_cache"}
        if self._sleep_level == 0 or not torch.cuda.is_available() or wanted <= self._freed:
            return 0
        before = await self._free_memory()
        if "weights" in self._freed:  # vLLM would take itself to be asleep, and keep a cache that came back
            await self._engine.wake_up(tags=["weights"])
        if "weights" in wanted:
            await self._engine.sleep(level=self._sleep_level)
        else:
            await self._engine.pause_generation(mode="abort")  # vLLM asks for it; waking the cache resumes
            await self._engine.release_kv_cache_memory()
        self._freed |= wanted
        return max(0, await self._free_memory() - before)

    async def wake(self, parts: Sequence[EnginePart]) -> None:
        self._asleep.difference_update(parts)
        if self._freed:
            await self._engine.wake_up(tags=list(parts))
            self._freed.difference_update(parts)

    async def _opens(self, path: str) -> bool:
        return all(await self._engine.collective_rpc("opens", args=(path,)))

    async def _free_memory(self) -> int:
        return sum(await self._engine.collective_rpc("free_device_memory"))

    async def health(self) -> None:
        await self._engine.check_health()

    async def shutdown(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            handler = getattr(engine, "output_handler", None)
            if handler is not None:
                handler.cancel()  # it would call the end of its connection an error
            await _in_thread(engine.shutdown)

    def kill(self) -> None:
        kill_marked(self._mark)


class VllmAdapterBackend(VllmBackend, AdapterBackend):
    """One for LoRA adapters that come apart from the weights; `max_rank` is the largest rank they may have."""

    def __init__(self, max_rank: int, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._adapter_files = AdapterFiles(max_rank)
        self._adapter_numbers = itertools.count(1)

    async def load_adapters(self, version: int, adapters: AsyncIterator[tuple[str, Tensor]]) -> None:
        from vllm.lora.request import LoRARequest

        engine = self._engine
        # Copies: what the stream hands out may be overwritten once the next tensor is asked for.
        tensors = {name: tensor.detach().to("cpu", copy=True) async for name, tensor in adapters}
        number = next(self._adapter_numbers)
        await engine.pause_generation(mode="abort")
        with tempfile.TemporaryDirectory(prefix="adapters-") as folder:
            self._adapter_files.write(Path(folder), tensors)
            adapter = LoRARequest(f"version-{version}-{number}", number, folder)
            await engine.add_lora(adapter)
        for old in set(await engine.list_loras()) - {number}:
            await engine.remove_lora(old)
        held = set(await engine.list_loras())
        if held != {number}:
            raise RuntimeError(f"vLLM should hold adapter {number} alone after the update, it holds {sorted(held)}")
        self._adapter = adapter
        await self._resume()


def drawn_logprobs(tokens: Sequence[int], entries: Any) -> list[float]:
    """Return the log-prob of each of `tokens` out of vLLM's `FlatLogprobs`.

    A position has the drawn token first, and after it those that the engine adds.
    """
    if not tokens:
        return []
    starts = entries.start_indices
    if len(starts) != len(tokens):
        raise RuntimeError(f"vLLM gave {len(tokens)} tokens with log-probs for {len(starts)}")
    ids, logprobs = entries.token_ids, entries.logprobs
    if len(ids) != len(tokens):
        ids, logprobs = [ids[i] for i in starts], [logprobs[i] for i in starts]
    if list(tokens) != ids:
        raise RuntimeError("vLLM gave log-probs of other tokens than those it drew")
    return list(logprobs)


@functools.cache
def _warn_of_stop_strings() -> None:
    logger.warning(
        "router_replay: vLLM tells no experts of a response that ends at a stop string, such as an agent asks for; "
        "training routes the tokens of such responses itself"
    )


def sampled_experts(routed: np.ndarray | None, read: int, *, complete: bool) -> np.ndarray | None:
    """Return what vLLM says of experts (uint8 or uint16, with the last part of a stream) as `Sampled.experts`.

    `read`: tokens that it has read; `complete`: it must tell of all of them, and not only of the first ones.
    """
    if routed is None:
        return None
    if routed.ndim != 3 or len(routed) > read or (complete and len(routed) < read):
        raise RuntimeError(
            f"vLLM gave experts of shape {routed.shape}, expected [{read} tokens read, layers, experts per token]"
        )
    return routed.astype(np.int16)


@contextlib.contextmanager
def _environment(defaults: Mapping[str, str], added: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for child processes started inside; restore this process's own afterwards.

    vLLM itself changes some too, such as LD_PRELOAD, which must not reach processes that others start.
    """
    before = dict(os.environ)
    os.environ.update({**defaults, **before, **added})
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


async def _in_thread(function: Callable[[], Any]) -> None:
    """Run it in a daemon thread, which can't keep this process from ending as those of an executor would."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def run() -> None:
        error: BaseException | None = None
        try:
            function()
        except Exception as caught:  # noqa: BLE001 - handed to who waits
            error = caught
        with contextlib.suppress(RuntimeError):  # nobody waits any more: the loop is closed
            loop.call_soon_threadsafe(settle, done, None, error)

    threading.Thread(target=run, name="vLLM shutdown", daemon=True).start()
    await done
