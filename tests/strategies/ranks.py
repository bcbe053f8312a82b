"""Processes that stay for the whole test session; copies of them play the ranks of one role after another."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from train_contract import make_info

_LIMIT = 400.0
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

    Each call has copies of the pool's processes, which keep nothing of it but what it imported. Engines that never let
    go of their process groups, modules that count what they have made, settings for a whole process: all end with it.
    """

    def __init__(self) -> None:
        self._ranks: list[tuple[multiprocessing.Process, Connection]] = []

    def run(self, function, world: int, *args, limit: float = _LIMIT) -> list:
        """Results in rank order; raises with every failed rank's traceback."""
        while len(self._ranks) < world:
            self._start()
        port = free_port()
        used = self._ranks[:world]
        for rank, (_, pipe) in enumerate(used):
            pipe.send_bytes(pickle.dumps((function, make_info(rank, world, port), args)))
        answers, failures = [], []
        for rank, (process, pipe) in enumerate(used):
            answer = self._answer(process, pipe, limit if not failures else 10.0)
            answers.append(answer)
            if "error" in answer:
                failures.append(f"rank {rank} of {world}: {answer['error']}")
        if failures:
            self.close()  # its peers may wait for ever
            raise RuntimeError("\n".join(failures))
        return [answer["result"] for answer in answers]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, list(sys.path)), daemon=True)
        process.start()
        theirs.close()
        self._ranks.append((process, mine))

    @staticmethod
    def _answer(process, pipe: Connection, limit: float) -> dict:
        try:
            if pipe.poll(limit):
                return pickle.loads(pipe.recv_bytes())
        except EOFError:
            process.join(5)
            return {"error": f"the process ended with exit code {process.exitcode}"}
        return {"error": f"no answer in {limit:g} s"}

    def close(self) -> None:
        """Kill all processes; the next `run` starts new ones."""
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
            process.join()
        self._ranks.clear()


def _serve(pipe: Connection, path: list[str]) -> None:
    sys.path[:] = path
    os.environ["OMP_NUM_THREADS"] = "1"
    # A process that has asked an accelerator's driver anything can't be copied; this question goes to another library.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, info, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        answer = _in_a_copy(function, info, args)
        pipe.send_bytes(pickle.dumps(answer))
        for name in answer.pop("imported", ()):
            with contextlib.suppress(Exception):  # what can't be imported alone is imported by each copy
                importlib.import_module(name)


def _in_a_copy(function, info, args) -> dict:
    source, target = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(source)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a pool that is closed ends its copies too
        before = set(sys.modules)
        try:
            answer = {"result": function(info, *args)}
        except Exception:  # noqa: BLE001 - whatever it is, the test that asked must see it
            answer = {"error": traceback.format_exc()}
        answer["imported"] = [n for n in sys.modules if n not in before and n.partition(".")[0] in _LIBRARIES]
        with os.fdopen(target, "wb") as file:
            pickle.dump(answer, file)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # nobody waits for threads, or for peers that have gone
    os.close(target)
    with os.fdopen(source, "rb") as file:
        said = file.read()
    _, status = os.waitpid(child, 0)
    if status or not said:
        return {"error": f"the process ended with exit code {os.waitstatus_to_exitcode(status)}"}
    return pickle.loads(said)


def status_bytes(key: str) -> int:
    """Return a size of this process, such as `VmRSS` or `VmHWM`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024
