"""A process that stays for the whole test session; copies of it play the ranks of one role after another."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path

from train_contract import make_info

_LIMIT = 600.0
_AFTER_A_FAILURE = 10.0
"""Seconds that the other ranks get: they may wait for the one that failed for ever."""
_UNSEEDED = random.SystemRandom()
_LIBRARIES = ("torch", "transformers", "deepspeed", "megatron", "peft", "roll")
"""What takes seconds to import is kept from one call to the next."""


def ephemeral_ports() -> range:
    """What the system gives to whoever asks for any port, or connects."""
    try:
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except OSError:  # not on Linux
        first, last = 32768, 65535
    return range(first, last + 1)


def free_port(draw: Callable[[int, int], int] = _UNSEEDED.randint) -> int:
    """A port for the first rank to listen at, seconds from now. It is none that the system gives to anybody meanwhile,
    and other pools draw among thousands."""
    highest = ephemeral_ports()[0] - 1
    for _ in range(100):
        port = draw(max(1024, highest - 16_000), highest)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise RuntimeError(f"no port below {highest} is free")


class RankPool:
    """`run(f, world, *args)` calls `f(info, *args)` in `world` processes at once; `f` is a module's top-level function.

    The ranks of all calls are copies of one process, which keeps nothing of a call but what it imported. Engines that
    never let go of their process groups, modules that count what they have made, settings for a whole process: all end
    with the copies.
    """

    def __init__(self) -> None:
        self._template: tuple[multiprocessing.Process, Connection] | None = None
        self._results: dict[bytes, list] = {}

    def run(self, function, world: int, *args, limit: float = _LIMIT) -> list:
        """Results in rank order; raises with every failed rank's traceback."""
        process, pipe = self._template = self._template or _start_template()
        try:
            pipe.send_bytes(pickle.dumps((function, world, free_port(), args, limit)))
            answers = [pickle.loads(pipe.recv_bytes()) for _ in range(world)]
        except (EOFError, OSError):
            self.close()
            raise RuntimeError(f"the process of all ranks ended with exit code {process.exitcode}") from None
        failures = [f"rank {r} of {world}: {answer['error']}" for r, answer in enumerate(answers) if "error" in answer]
        if failures:
            raise RuntimeError("\n".join(failures))
        return [answer["result"] for answer in answers]

    def once(self, function, world: int, *args) -> list:
        """Return what `run` returns, played once for all tests that ask the same; nobody may change it."""
        key = pickle.dumps((function, world, args))
        if key not in self._results:
            self._results[key] = self.run(function, world, *args)
        return self._results[key]

    def close(self) -> None:
        """Kill all processes; the next `run` starts new ones."""
        if self._template:
            process, pipe = self._template
            pipe.close()
            process.kill()
            process.join()
        self._template = None


def _start_template() -> tuple[multiprocessing.Process, Connection]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, list(sys.path)), daemon=True)
    process.start()
    theirs.close()
    return process, mine


def _serve(pipe: Connection, path: list[str]) -> None:
    sys.path[:] = path
    os.environ["OMP_NUM_THREADS"] = "1"
    # A process that has asked an accelerator's driver anything can't be copied; this question goes to another library.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, world, port, args, limit = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        gc.freeze()  # copies neither walk nor write to what all of them share
        copies = [_copy(function, make_info(rank, world, port), args) for rank in range(world)]
        answers = _answers(copies, limit)
        for answer, _ in answers:
            pipe.send_bytes(answer)
        for name in {name: None for _, names in answers for name in names}:
            with contextlib.suppress(Exception):  # what can't be imported alone is imported by each copy
                importlib.import_module(name)


def _copy(function, info, args) -> tuple[int, Connection]:
    """Start a copy of this process on a call; return its id, and where it answers."""
    source, target = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child:
        target.close()
        return child, source
    source.close()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a pool that is closed ends its copies too
    before = set(sys.modules)
    try:
        failed, answer = False, pickle.dumps({"result": function(info, *args)})
    except Exception:  # noqa: BLE001 - whatever it is, the test that asked must see it
        failed, answer = True, pickle.dumps({"error": traceback.format_exc()})
    target.send_bytes(answer)
    imported = [n for n in sys.modules if n not in before and n.partition(".")[0] in _LIBRARIES]
    target.send_bytes(pickle.dumps((failed, imported)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # nobody waits for threads, or for peers that have gone


def _answers(copies: list[tuple[int, Connection]], limit: float) -> list[tuple[bytes, list[str]]]:
    """Return what each copy answers, pickled, and what it imported; kill those that are late."""
    found, waiting = {}, {source: (rank, child) for rank, (child, source) in enumerate(copies)}
    deadline = time.monotonic() + limit
    while waiting and (ready := wait(list(waiting), deadline - time.monotonic())):
        for source in ready:
            rank, child = waiting.pop(source)
            try:
                answer, (failed, imported) = source.recv_bytes(), pickle.loads(source.recv_bytes())
            except EOFError:
                answer, failed, imported = None, True, []
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            found[rank] = answer or pickle.dumps({"error": f"the process ended with exit code {code}"}), imported
            if failed:
                deadline = min(deadline, time.monotonic() + _AFTER_A_FAILURE)
    for rank, child in waiting.values():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found[rank] = pickle.dumps({"error": f"no answer in {limit:g} s, or after another rank's failure"}), []
    return [found[rank] for rank in range(len(copies))]


def status_bytes(key: str) -> int:
    """Return a size of this process, such as `VmRSS` or `VmHWM`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024
