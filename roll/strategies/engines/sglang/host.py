"""The process that holds SGLang's engine: `python -m roll.strategies.engines.sglang.host <socket's file descriptor>`.

A thread reads what the owner says, so that the owner's death is noticed even while the engine starts; everything else
runs on the engine's event loop in the main thread, where SGLang installs its signal handlers.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Sequence
from typing import Any

from roll.distributed.transports.bucket_layout import Entry
from roll.strategies.engines.sglang import sglang_loader as loader
from roll.strategies.engines.sglang.sglang_channel import LENGTH, REFUSED, START_CALL, Answers, frame

_IDLE_TIMEOUT = 60.0  # seconds SGLang gets to finish what is left of aborted requests
_ANSWER_TIMEOUT = 300.0  # seconds between the first rank that has loaded a bucket and the last one


def _end_with_everything() -> None:
    """Kill the group of SGLang's processes, which this one leads: nobody is left who could use them."""
    os.killpg(os.getpgrp(), signal.SIGKILL)


class _Host:
    """The engine and its connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("rb")
        self._early: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._update = ""
        self._tasks: set[asyncio.Task[None]] = set()
        threading.Thread(target=self._read, name="owner", daemon=True).start()

    def run(self) -> None:
        """Start the engine, then serve until the owner is gone."""
        _, arguments = self._early.get()
        try:
            import sglang

            self._engine: Any = sglang.Engine(**arguments)
        except Exception as error:
            self._send(("answer", START_CALL, None, f"{type(error).__name__}: {error}"))
            raise
        self._tp_size = int(arguments["tp_size"])
        self._num_ranks = self._tp_size * int(arguments.get("pp_size") or 1)
        self._answers = Answers(self._num_ranks)
        self._manager = self._engine.tokenizer_manager
        loop: asyncio.AbstractEventLoop = self._engine.loop
        self._loop = loop
        self._send(("answer", START_CALL, sorted(self._manager.model_config.hf_eos_token_id or ()), ""))
        loop.run_forever()

    def _read(self) -> None:
        try:
            while True:
                (size,) = LENGTH.unpack(self._exactly(LENGTH.size))
                message = pickle.loads(self._exactly(size))
                if self._loop is None:
                    self._early.put(message)
                else:
                    self._loop.call_soon_threadsafe(self._take, message)
        finally:
            _end_with_everything()

    def _exactly(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError("the owner is gone")
        return data

    def _send(self, message: tuple[Any, ...]) -> None:
        # The owner reads all the time; blocking here for a moment only slows tokens down that it can't take yet.
        self._connection.sendall(frame(message))

    def _take(self, message: tuple[Any, ...]) -> None:
        assert self._loop is not None
        kind, *content = message
        if kind == "abort":
            for rid in content[0]:
                self._abort(rid)
            return
        task = self._loop.create_task(self._generate(*content) if kind == "generate" else self._call(*content))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _abort(self, rid: str) -> None:
        state = self._manager.rid_to_state.get(rid)
        if state is not None:
            # SGLang sends an abort once; one that overtook its request has to be sent again.
            state.abort_sent = False
            self._manager.abort_request(rid)

    async def _generate(self, rid: str, prompt_ids: Sequence[int], params: dict[str, Any], cut: bool) -> None:
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(
            rid=rid,
            input_ids=list(prompt_ids),
            sampling_params=params,
            return_logprob=True,
            return_sampling_mask=cut or None,
            stream=True,
        )
        try:
            async for output in self._manager.generate_request(request, None):
                meta = output["meta_info"]
                tokens = list(output.get("output_ids") or ())
                # Lists of log-probs are those of these tokens, or of the response so far: the last ones fit both.
                if cut:
                    logprobs = list(meta.get("output_token_sampling_logprobs") or ())
                else:
                    logprobs = [entry[0] for entry in meta.get("output_token_logprobs") or ()]
                self._send(("sampled", rid, tokens, logprobs[-len(tokens) :] if tokens else [], *_end(meta)))
        except ValueError as error:  # what SGLang says of a request that it doesn't take
            self._send(("sampled", rid, [], [], REFUSED, f"SGLang refuses it: {error}"))
        except Exception as error:  # noqa: BLE001 - told to the owner, for whom the engine is then dead
            self._send(("sampled", rid, [], [], "abort", f"{type(error).__name__}: {error}"))

    async def _call(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        try:
            value = await getattr(self, f"do_{name}")(*arguments)
        except Exception as error:  # noqa: BLE001 - told to the owner
            self._send(("answer", number, None, f"{type(error).__name__}: {error}"))
        else:
            self._send(("answer", number, value, ""))

    # Operations.

    async def do_begin(self) -> None:
        """Open a weight update. SGLang itself lets it wait for the end of every request."""
        from sglang.srt.managers import io_struct

        self._update = uuid.uuid4().hex
        _check("begin", await self._manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput(), None))

    async def do_opens(self, path: str) -> bool:
        """Return whether every rank can read this memory of an accelerator."""
        return await self._tell(path, trial=True)

    async def do_bucket(self, path: str, entries: list[Entry]) -> None:
        """Let every rank load the tensors of this bucket."""
        await self._tell(path, entries)

    async def _tell(self, *content: Any, trial: bool = False) -> bool:
        """Hand a message to the loader of every rank; whether all say yes, once the last one has answered."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        self._answers.clear()
        message = loader.message(self._update, self._answers.path, *content, trial=trial)
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[message] * self._tp_size, load_format=loader.LOADER, flush_cache=False
        )
        _check("bucket", await self._manager.update_weights_from_tensor(request, None))
        return await self._answers.wait(_ANSWER_TIMEOUT)

    async def do_end(self, version: int) -> None:
        """Close the weight update, forget cached keys and values, name the version."""
        from sglang.srt.managers import io_struct

        if not await self._tell():
            raise RuntimeError(
                "SGLang's model left parameters of the weight update untouched and would go on with old ones; what its "
                "processes printed names them. Use vllm or hf_infer for this model"
            )
        _check("end", await self._manager.end_weight_update(io_struct.EndWeightUpdateReqInput(), None))
        await self._settle()
        await self._manager.update_weight_version(
            io_struct.UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
        )

    async def do_release(self, tags: list[str]) -> int:
        """Free memory; bytes freed on all devices of the engine."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self._settle()
        before = self._memory_used()
        await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags), None)
        return max(0, before - self._memory_used())

    async def do_resume(self, tags: list[str]) -> None:
        """Take memory again."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags), None)

    async def do_shutdown(self) -> None:
        """End SGLang's processes; this one ends when the owner hangs up."""
        self._engine.shutdown()

    async def _settle(self) -> None:
        """Wait until no request is left, and empty the prefix cache."""
        flushed = await self._manager.flush_cache(timeout_s=_IDLE_TIMEOUT)
        if not flushed.success:
            raise TimeoutError(
                f"SGLang's scheduler wasn't idle within {_IDLE_TIMEOUT:g} s and kept its prefix cache: "
                f"{flushed.message}"
            )

    def _memory_used(self) -> int:
        import torch

        if not torch.cuda.is_available():
            return 0
        # Asked of the driver: a context of this process would itself take memory.
        return sum(torch.cuda.device_memory_used(i) for i in range(min(self._num_ranks, torch.cuda.device_count())))


def _end(meta: dict[str, Any]) -> tuple[str | None, str]:
    """Return why a response ends, or None, and what went wrong, or ""."""
    reason = meta.get("finish_reason")
    if reason is None:
        return None, ""
    # A request that is refused or fails ends with an HTTP status of failure; one that was aborted doesn't.
    status = int(reason.get("status_code") or 0)
    if reason["type"] != "abort" or status < 400:
        return reason["type"], ""
    return REFUSED if status < 500 else "abort", f"SGLang refuses it: {reason.get('message')}"


def _check(what: str, result: tuple[Any, ...]) -> None:
    """Raise for a failed update, which SGLang reports in what it returns and goes on with the old weights."""
    success, message = result[0], result[1]
    if not success:
        raise RuntimeError(f"SGLang refused a weight update ({what}): {message}")


if __name__ == "__main__":
    _Host(socket.socket(fileno=int(sys.argv[1]))).run()
