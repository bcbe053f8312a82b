"""Workers for the tests, in a module of their own so that another process can import them. No torch at import."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

from roll.distributed.dispatch import Dispatch, dispatch
from roll.distributed.handles import Handle, put, resolve
from roll.distributed.layout import RankLayout
from roll.distributed.worker import Worker, WorkerInfo


class Echo(Worker):
    """Does as it is told."""

    def __init__(self, info: WorkerInfo, greeting: str = "hello") -> None:
        super().__init__(info)
        if greeting == "refuse":
            raise ValueError("greeting 'refuse' isn't allowed")
        self.greeting = greeting
        self.torch_was_loaded = "torch" in sys.modules

    @dispatch(Dispatch.ONE_TO_ALL)
    def greet(self, name: str) -> str:
        return f"{self.greeting} {name} from {self.info.role} {self.info.rank}"

    @dispatch(Dispatch.RANK_ZERO)
    def first(self) -> WorkerInfo:
        return self.info

    @dispatch(Dispatch.ONE_TO_ALL)
    def environment(self, names: list[str]) -> dict[str, Any]:
        return {"torch_was_loaded": self.torch_was_loaded, **{name: os.environ.get(name) for name in names}}

    @dispatch(Dispatch.SPLIT_BY_DP)
    def double(self, batch: Any, factor: float = 2.0) -> Any:
        return batch.with_columns(value=batch.require("value") * factor)

    @dispatch(Dispatch.SPLIT_BY_DP)
    def count(self, batch: Any) -> Any:
        from roll.types.metrics import Metrics

        metrics = Metrics()
        metrics.add_sum("rows", len(batch))
        metrics.add_max("tokens_max", batch.num_tokens)
        metrics.add_min("tokens_min", batch.num_tokens)
        return metrics

    @dispatch(Dispatch.SPLIT_BY_DP)
    def swallow(self, batch: Any) -> None:
        return None

    @dispatch(Dispatch.SPLIT_BY_DP)
    def answer_wrongly(self, batch: Any) -> str:
        return "a string"

    @dispatch(Dispatch.RANK_ZERO)
    def refuse(self, what: str) -> None:
        raise ValueError(f"can't do {what}")

    @dispatch(Dispatch.RANK_ZERO)
    def lookup(self) -> None:
        return {}["absent"]

    @dispatch(Dispatch.RANK_ZERO)
    def thread(self) -> str:
        return threading.current_thread().name

    @dispatch(Dispatch.ONE_TO_ALL)
    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    @dispatch(Dispatch.ONE_TO_ALL)
    def fail_on(self, rank: int, seconds: float) -> None:
        if self.info.rank == rank:
            raise KeyError(f"rank {rank}")
        time.sleep(seconds)

    @dispatch(Dispatch.ONE_TO_ALL)
    def exit_on(self, rank: int, others: str) -> None:
        """One rank dies; the others hang, or fail a moment earlier as broken collectives do."""
        if self.info.rank == rank:
            time.sleep(0.3 if others == "fail" else 0.0)
            sys.stderr.write(f"the last words of rank {rank}\n")
            os._exit(7)
        if others == "fail":
            raise RuntimeError("connection reset by peer")
        time.sleep(60)

    @dispatch(Dispatch.ONE_TO_ALL)
    def kill_on(self, rank: int) -> None:
        if self.info.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    @dispatch(Dispatch.RANK_ZERO)
    def give_a_lock(self) -> Any:
        return threading.Lock()

    @dispatch(Dispatch.ONE_TO_ALL)
    def all_reduce(self) -> float:
        import torch
        import torch.distributed as dist

        from roll.distributed.process_group import init_process_group

        if not dist.is_initialized():
            init_process_group(self.info, "gloo")
        value = torch.tensor([float(self.info.rank + 1)])
        dist.all_reduce(value)
        return float(value)

    @dispatch(Dispatch.ONE_TO_ALL)
    def reduce_late(self, rank: int, seconds: float, patience: float) -> float:
        """One rank comes `seconds` late to a collective, of which the others have `patience`."""
        self.all_reduce()
        import torch
        import torch.distributed as dist

        from roll.distributed.process_group import limit_collectives

        limit_collectives(patience)
        if self.info.rank == rank:
            time.sleep(seconds)
        value = torch.ones(())
        dist.all_reduce(value)
        return float(value)

    @dispatch(Dispatch.RANK_ZERO)
    def meet_nobody(self) -> None:
        from roll.distributed.process_group import init_process_group

        init_process_group(self.info, "gloo", timeout=1)


class Clumsy(Echo):
    """Fails at the last moment."""

    def close(self) -> None:
        raise OSError("the engine doesn't answer")


class Pair(Echo):
    """Two ranks that share one data shard, as tensor-parallel peers do; the second one collects."""

    @dispatch(Dispatch.ONE_TO_ALL)
    def layout(self) -> RankLayout:
        return RankLayout(dp_rank=0, dp_size=1, collects=self.info.rank == 1)


def send_weights(named: Any, bucket_bytes: int = 2**28, version: int = 0) -> list[Handle]:
    """A stream in buckets behind handles."""
    from roll.distributed.weights import BucketWriter

    writer = BucketWriter(bucket_bytes, version)
    for name, tensor in named:
        writer.add(name, tensor)
    return writer.finish()


class Trainer(Worker):
    """Has weights to send."""

    @dispatch(Dispatch.RANK_ZERO)
    def send(self, bucket_bytes: int, version: int) -> list[Handle]:
        return send_weights(weights(), bucket_bytes, version)

    @dispatch(Dispatch.RANK_ZERO)
    def publish(self, text: str) -> Handle:
        return put({"text": text})


class Sampler(Worker):
    """Takes weights."""

    @dispatch(Dispatch.ONE_TO_ALL)
    def receive(self, handles: list[Handle], version: int) -> str:
        from roll.distributed.weights import receive_weights, weights_checksum

        return weights_checksum(receive_weights(handles, version))

    @dispatch(Dispatch.ONE_TO_ALL)
    def read(self, handle: Handle) -> Any:
        return resolve(handle)


def weights() -> Any:
    """A stream of named tensors of several types, among them a transposed one and a scalar."""
    import torch

    torch.manual_seed(0)
    yield "embed", torch.randn(50, 8)
    yield "layer.weight", torch.randn(8, 8).bfloat16()
    yield "layer.transposed", torch.randn(4, 6).t()
    yield "layer.half", torch.randn(3).half()
    yield "step", torch.tensor(7)
    yield "mask", torch.tensor([True, False])
    yield "empty", torch.zeros(0, 3)
