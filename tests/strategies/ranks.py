"""Processes that stay for the whole test session and play the ranks of one role after another."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import sys
import traceback
from multiprocessing.connection import Connection

from train_contract import make_info

_LIMIT = 180.0
_MOST_THREADS = 150
"""Some engines never let go of their process groups, and gloo's threads of closed connections keep a core busy: a
process with so many is replaced."""


class RankPool:
    """`run(f, world, *args)` calls `f(info, *args)` in `world` processes at once; `f` is a module's top-level function.

    A process keeps its imports from one call to the next; process groups are taken down after each.
    """

    def __init__(self) -> None:
        self._ranks: list[tuple[multiprocessing.Process, Connection]] = []

    def run(self, function, world: int, *args, limit: float = _LIMIT) -> list:
        """Results in rank order; raises with every failed rank's traceback."""
        while len(self._ranks) < world:
            self._start()
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
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
        if any(answer["threads"] > _MOST_THREADS for answer in answers):
            self.close()
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
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, info, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = {"result": function(info, *args)}
        except Exception:  # noqa: BLE001 - whatever it is, the test that asked must see it
            answer = {"error": traceback.format_exc()}
        _disconnect()
        pipe.send_bytes(pickle.dumps({**answer, "threads": len(os.listdir("/proc/self/task"))}))


def _disconnect() -> None:
    """Forget every process group, those that libraries keep for themselves included."""
    import torch.distributed as dist

    if "megatron.core.parallel_state" in sys.modules:
        sys.modules["megatron.core.parallel_state"].destroy_model_parallel()
    if "deepspeed.utils.groups" in sys.modules:
        sys.modules["deepspeed.utils.groups"]._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    if dist.is_initialized():
        dist.destroy_process_group()
    comm = sys.modules.get("deepspeed.comm.comm")
    if comm is not None:
        comm.cdb = None
        sys.modules["deepspeed.utils.groups"]._WORLD_GROUP = None
    zero = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    if zero is not None:
        # Numbers of modules and parameters count up for as long as a process lives, and must be alike on all ranks.
        zero.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
        zero.Init.param_id = 0
