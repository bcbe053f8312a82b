"""How fast weight sync is for every transport, compared with what the machine can do at best.

    python benchmarks/weight_sync.py --gigabytes 0.1 0.5 --engines 1 2 --rounds 5
    python benchmarks/weight_sync.py --vllm MODEL --rounds 5
    python benchmarks/weight_sync.py --trainers 2 --transports buckets shares

A trainer, of one rank unless `--trainers` says more, and some engines, each in a process of its own under `ray`. An
engine copies each tensor into its own model. Transports and bounds take turns in each round, so that the load of the
machine affects all alike:

* memcpy: one copy of as many bytes inside the trainer;
* copy per engine: each engine copies as many bytes inside itself, all at once: the lower bound of any transport;
* disk: the bytes written to a file, flushed, and read back, the lower bound of `file`.

`shared_memory` sends weights from where they lie, as a trainer of one rank on the host does whose engines compute in
the type that it trains in. `buckets` is the same transport as all other trainers use it. A transport through a buffer
costs one copy more, in the trainer, which takes turns with the engines where there are fewer cores than processes. With
`--vllm` the receiver is a real vLLM engine on the model in that folder.

`shares` is `buckets` with all ranks of the trainer as senders, of every nth bucket each: for ranks that have a core or
a link to the host of their own.

`delta` is `buckets` with `delta_weight_sync`, after `--changed` of all numbers changed at random places. Its seconds
include comparing in the trainer and patching in the engines.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from roll.distributed.dispatch import Dispatch, dispatch
from roll.distributed.executors import make_executor
from roll.distributed.placement import RolePlacement
from roll.distributed.transports import Sent, TransferSummary, Transport, receive, send
from roll.distributed.transports.delta import Delta, WeightCopy
from roll.distributed.transports.shm_places import share
from roll.distributed.worker import Worker, WorkerInfo
from roll.pipelines.rl.sync import WeightSync

BUCKETS = "buckets"
DELTA = "delta"
SHARES = "shares"
TRANSPORTS = ("shared_memory", BUCKETS, SHARES, DELTA, "broadcast", "object_store", "file")
LAYERS = 24
COPIES = "copy per engine"


class Trainer(Worker):
    """Holds `gigabytes` of float32 in tensors like those of a transformer, or the weights of a model's folder."""

    def __init__(self, info: WorkerInfo, gigabytes: float, model: str) -> None:
        import torch

        super().__init__(info)
        self.weights: dict[str, Any] = {}
        self.placed: dict[str, Any] = {}
        self.way = ""
        self.copy = WeightCopy()
        if model:
            from transformers import AutoModelForCausalLM

            from roll.strategies.training.pretrained import named_tensors

            loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
            self.weights = {name: tensor.detach() for name, tensor in named_tensors(loaded)}
            return
        torch.manual_seed(0)  # the same on every rank
        width = max(8, int((gigabytes * 1e9 / 4 / LAYERS / 12) ** 0.5))  # 12 width^2 to a layer
        for layer in range(LAYERS):
            for name, shape in {"attention": (4 * width, width), "mlp": (8 * width, width), "norm": (width,)}.items():
                self.weights[f"layers.{layer}.{name}.weight"] = torch.randn(shape)

    @dispatch(Dispatch.ONE_TO_ALL)
    def send_weights(self, transport: Transport, delta: Delta | None = None) -> Sent:
        weights = self.placed if self.way == "shared_memory" else self.weights
        return send(transport, lambda: iter(weights.items()), self.info.rank, delta=delta, copy=self.copy)

    @dispatch(Dispatch.ONE_TO_ALL)
    def sends_from_every_rank(self) -> bool:
        return self.way == SHARES

    @dispatch(Dispatch.ONE_TO_ALL)
    def gathers_on_host(self) -> bool:
        return False

    @dispatch(Dispatch.ONE_TO_ALL)
    def weight_copy(self) -> str:
        return self.copy.name

    @dispatch(Dispatch.ONE_TO_ALL)
    def prepare(self, way: str, changed: float) -> None:
        """Send the next weights in this way; for a delta a share of all numbers changes before."""
        import torch

        for tensor in self.weights.values() if way == DELTA else ():
            flat = tensor.view(-1)
            flat[torch.randint(len(flat), (round(changed * len(flat)),))] += 1
        self.way = way
        if way == "shared_memory" and not self.placed:
            self.placed = {name: tensor.clone() for name, tensor in self.weights.items()}
            share(self.placed.values())

    @dispatch(Dispatch.RANK_ZERO)
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.weights.items()}

    @dispatch(Dispatch.RANK_ZERO)
    def memcpy(self) -> float:
        """Return seconds for one copy of all weights, into memory that was touched before."""
        import torch

        if not hasattr(self, "target"):
            self.target = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}
        start = time.perf_counter()
        for name, tensor in self.weights.items():
            self.target[name].copy_(tensor)
        return time.perf_counter() - start

    @dispatch(Dispatch.RANK_ZERO)
    def disk(self, folder: str) -> float:
        """Return seconds to write as many bytes, flush them, and read them back."""
        path = Path(folder) / "bound"
        start = time.perf_counter()
        with open(path, "wb") as file:
            for tensor in self.weights.values():
                file.write(tensor.numpy().data)
            file.flush()
            os.fsync(file.fileno())
        with open(path, "rb") as file:
            while file.read(2**24):
                pass
        seconds = time.perf_counter() - start
        path.unlink()
        return seconds


class Engine(Worker):
    """Copies what arrives into a model of its own."""

    def __init__(self, info: WorkerInfo, shapes: dict[str, tuple[int, ...]]) -> None:
        import torch

        super().__init__(info)
        self.weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
        self.copy = WeightCopy()

    @dispatch(Dispatch.ONE_TO_ALL)
    def weight_copy(self) -> str:
        return self.copy.name

    @dispatch(Dispatch.ONE_TO_ALL)
    def update_weights(self, transport: Transport, handles: list[Any], delta: Delta | None = None) -> TransferSummary:
        with receive(transport, handles, self.info.rank, delta=delta, copy=self.copy) as incoming:
            for name, tensor in incoming:
                self.weights[name].copy_(tensor)
        return incoming.summary()

    @dispatch(Dispatch.ONE_TO_ALL)
    def memcpy(self) -> float:
        """Return seconds for one copy of all weights, into memory that was touched before."""
        import torch

        if not hasattr(self, "source"):
            self.source = {name: torch.ones_like(tensor) for name, tensor in self.weights.items()}
        start = time.perf_counter()
        for name, tensor in self.source.items():
            self.weights[name].copy_(tensor)
        return time.perf_counter() - start


class VllmEngine(Worker):
    """A real vLLM engine."""

    def __init__(self, info: WorkerInfo, model: str) -> None:
        from roll.configs.schema.engine_config import VllmConfig
        from roll.configs.schema.worker_config import ModelArgs
        from roll.strategies.base import EngineSettings
        from roll.strategies.engines.vllm.vllm_engine import build

        super().__init__(info)
        settings = EngineSettings(
            max_running_requests=4, max_sequence_length=128, seed=1, slots=info.slots, update_buffer_bytes=64 << 20
        )
        self.engine = build(ModelArgs(model_name_or_path=model, dtype="fp32"), VllmConfig(enforce_eager=True), settings)
        self.copy = WeightCopy()

    @dispatch(Dispatch.ONE_TO_ALL)
    def weight_copy(self) -> str:
        return self.copy.name

    @dispatch(Dispatch.ONE_TO_ALL)
    def update_weights(self, transport: Transport, handles: list[Any], delta: Delta | None = None) -> TransferSummary:
        with receive(transport, handles, self.info.rank, delta=delta, copy=self.copy) as incoming:
            self.engine.update_weights(transport.transfer.version, incoming)
        return incoming.summary()

    def close(self) -> None:
        self.engine.close()


def config_of(way: str, folder: Path, bucket_mb: int) -> Any:
    """Return the keys that weight sync reads."""
    model = SimpleNamespace(dtype="fp32")
    engine = SimpleNamespace(strategy_args=SimpleNamespace(strategy_name="vllm"), model_args=model)
    return SimpleNamespace(
        weight_transport="shared_memory" if way in (BUCKETS, SHARES, DELTA) else way,
        model_update_buffer_size_mb=bucket_mb,
        verify_weight_sync="off",
        lora_sync="merged",
        delta_weight_sync=way == DELTA,
        engine_restarts=0,
        async_generation_ratio=0.0,
        rpc_timeout=600.0,
        output_path=folder,
        actor_infer=engine,
    )


def measure(args: argparse.Namespace, gigabytes: float, engines: int, folder: Path) -> None:
    slots = tuple((i,) for i in range(args.trainers + engines))
    roles = [RolePlacement("trainer", slots[: args.trainers]), RolePlacement("engines", slots[args.trainers :])]
    with make_executor("ray", roles, rpc_timeout=600) as executor:
        trainer = executor.create_cluster(roles[0], Trainer, (gigabytes, args.vllm))
        if args.vllm:
            receivers = executor.create_cluster(roles[1], VllmEngine, (args.vllm,))
        else:
            receivers = executor.create_cluster(roles[1], Engine, (trainer.call(Trainer.shapes),))
        clusters = SimpleNamespace(actor_train=trainer, actor_infer=receivers)
        syncs = {
            name: WeightSync(config_of(name, folder, args.bucket_mb), clusters, None)  # type: ignore[arg-type]
            for name in args.transports
        }
        seconds: dict[str, list[float]] = {"memcpy": [], COPIES: [], "disk": [], **{name: [] for name in syncs}}
        sizes: dict[str, float] = {}
        for version in range(args.rounds + 1):  # the first one connects and touches memory
            taken = {"memcpy": trainer.call(Trainer.memcpy), "disk": trainer.call(Trainer.disk, str(folder))}
            # A vLLM engine's own copy can't be asked for: the trainer's stands for it.
            taken[COPIES] = taken["memcpy"] if args.vllm else max(receivers.call(Engine.memcpy))
            for name, sync in syncs.items():
                trainer.call(Trainer.prepare, name, args.changed)
                sync(version)
                sizes[name] = sync.metrics["sync/gigabytes"]
                taken[name] = sizes[name] / sync.metrics["throughput/sync_gb_per_second"]
            if version:
                for name, value in taken.items():
                    seconds[name].append(value)
        for sync in syncs.values():
            sync.close()
    report(args, sizes, engines, seconds)


def report(args: argparse.Namespace, sizes: dict[str, float], engines: int, seconds: dict[str, list[float]]) -> None:
    size = max(sizes.values())  # of a way that sends all
    what = f"vLLM on {Path(args.vllm).name}" if args.vllm else "copying receivers"
    print(f"\n{size:.2f} GB to {engines} engine(s) ({what}), buckets of {args.bucket_mb} MiB, "
          f"{args.trainers} rank(s) of the trainer, {args.rounds} rounds\n")  # fmt: skip
    print("| way | median s | fastest s | GB/s (median) | of its bound | GB sent |")
    print("|---|---|---|---|---|---|")
    for name, times in seconds.items():
        bound = seconds["disk" if name == "file" else COPIES]
        share = median(b / t for b, t in zip(bound, times, strict=True))
        shown = f"{share:.0%}" if name not in ("memcpy", COPIES, "disk") else "-"
        speed, sent = size / median(times), f"{sizes[name]:.5f}" if name in sizes else "-"
        print(f"| {name} | {median(times):.3f} | {min(times):.3f} | {speed:.2f} | {shown} | {sent} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", nargs="+", type=float, default=[0.1, 0.5])
    parser.add_argument("--engines", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--trainers", type=int, default=1, help="ranks of the trainer")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--changed", type=float, default=0.02, help="share of the numbers that change before a delta")
    parser.add_argument("--vllm", default="", help="folder of a model: the receiver is a vLLM engine on it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.vllm:
            measure(args, 0.0, 1, Path(folder))
            return
        for gigabytes in args.gigabytes:
            for engines in args.engines:
                measure(args, gigabytes, engines, Path(folder))


if __name__ == "__main__":
    main()
