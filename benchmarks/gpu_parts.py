"""Single parts of a training step on one accelerator; `gpu.py` runs them all.

    python benchmarks/gpu_parts.py head         # log-probs and gradients: small chunks, large ones, liger's kernel
    python benchmarks/gpu_parts.py attention    # packed rows in one call of torch's kernel, and row by row
    python benchmarks/gpu_parts.py optimizer    # AdamW: torch's fused one, which is used on accelerators, and plain
    python benchmarks/gpu_parts.py waits        # calls in which a train step waits for the device
    python benchmarks/gpu_parts.py sleep        # a role's memory to the host and back
    python benchmarks/gpu_parts.py head --dry-run

Medians over `--rounds`, after one that isn't counted.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from gpu_model import write_model

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

WAITING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls that return when the device has done its work."""
WAITED = "aten::_local_scalar_dense"
"""What reads a number off a tensor: on a device, each is a wait."""


def device() -> Any:
    """Return where the parts run."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measured(work: Callable[[], Any], rounds: int) -> tuple[float, int]:
    """Return (median seconds of `work`, peak bytes above what was held before; 0 without an accelerator)."""
    import torch

    def once() -> float:
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - started

    once()
    if not torch.cuda.is_available():
        return median(once() for _ in range(rounds)), 0
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    seconds = median(once() for _ in range(rounds))
    return seconds, torch.cuda.max_memory_allocated() - held


def machine(args: argparse.Namespace) -> None:
    """Print the accelerators and the versions that the other figures belong to."""
    import torch

    del args
    print("| what | |\n|---|---|")
    packages = importlib.metadata.packages_distributions()
    for name in ("torch", "transformers", "vllm", "sglang", "liger_kernel", "flash_attn", "transformer_engine"):
        versions = {importlib.metadata.version(gpu) for gpu in packages.get(name, ())}
        print(f"| {name} | {', '.join(sorted(versions)) or 'not installed'} |")
    print(f"| Python | {platform.python_version()} |")
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        print(f"| device {i} | {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute {gpu.major}.{gpu.minor} |")
    if not torch.cuda.is_available():
        print("| devices | none |")


def head(args: argparse.Namespace) -> None:
    """Compare ways to get log-probs and their gradients from hidden states."""
    import torch

    from roll.strategies.training import logits

    tokens, width, vocabulary = (32, 16, 100) if args.dry_run else (16384, 1024, 151936)
    kind = torch.float32 if args.dry_run else torch.bfloat16
    layer = torch.nn.Linear(width, vocabulary, bias=False, device=device(), dtype=kind)
    hidden = torch.randn(tokens, width, device=device(), dtype=kind, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,), device=device())

    def ours(mebibytes: float) -> Callable[[], None]:
        def work() -> None:
            logits.chunk_elements = lambda _: int(mebibytes * 2**18)
            outputs = logits.head_outputs(hidden, layer, targets, logits.HeadRequest(), temperature=1.0)
            assert outputs.logprobs is not None
            outputs.logprobs.sum().backward()

        return work

    def fused() -> None:
        from roll.strategies.hf.fused import fused_logprobs

        fused_logprobs(hidden, layer, targets, 1.0).sum().backward()

    small = 0.002 if args.dry_run else 128
    ways = {f"chunks of {small:g} MiB": ours(small), f"chunks of {8 * small:g} MiB": ours(8 * small)}
    if device().type == "cuda" and importlib.util.find_spec("liger_kernel"):
        ways["liger"] = fused
    print(f"{tokens} tokens, width {width}, vocabulary {vocabulary}\n\n| head | ms | peak MiB |\n|---|---|---|")
    chosen = logits.chunk_elements
    try:
        for name, work in ways.items():
            seconds, peak = measured(work, args.rounds)
            print(f"| {name} | {seconds * 1e3:.1f} | {peak / 2**20:.0f} |")
    finally:
        logits.chunk_elements = chosen


def attend(tensors: tuple[Any, Any, Any], plan: Any, *, one_call: bool) -> Any:
    """Compute attention over rows, forward and backward, in one call of the kernel or row by row: [N, H, D]."""
    from roll.strategies.attention import attention as module

    chosen = module.has_varlen_kernel
    module.has_varlen_kernel = lambda *_: one_call
    try:
        out = module.varlen_attention(*tensors, plan, scale=tensors[0].shape[-1] ** -0.5)
    finally:
        module.has_varlen_kernel = chosen
    out.sum().backward()
    return out.detach()


def attention(args: argparse.Namespace) -> None:
    """Compare ways to compute a layer's attention over many short rows, and over one long row."""
    import torch

    from roll.strategies.attention.varlen_kernel import RowPlan, has_varlen_kernel

    heads, shared, size = (4, 2, 16) if args.dry_run else (16, 8, 128)
    kind = torch.float32 if args.dry_run else torch.bfloat16
    ways = {"row by row": False} | ({"one call": True} if has_varlen_kernel(device(), kind, size) else {})
    print(f"{heads} heads of {size}, {shared} of keys, forward and backward\n")
    print("| rows | attention | ms | peak MiB | largest difference |\n|---|---|---|---|---|")
    for count, length in ((3, 5), (1, 16)) if args.dry_run else ((80, 200), (1, 16384)):
        made = [torch.randn(count * length, n, size, device=device(), dtype=kind) for n in (heads, shared, shared)]
        tensors, plan = tuple(tensor.requires_grad_() for tensor in made), RowPlan([length] * count)
        expected = attend(tensors, plan, one_call=False)
        for name, one_call in ways.items():
            work = partial(attend, tensors, plan, one_call=one_call)
            difference = float((work() - expected).abs().max())
            seconds, peak = measured(work, args.rounds)
            print(f"| {count} of {length} | {name} | {seconds * 1e3:.2f} | {peak / 2**20:.0f} | {difference:.1e} |")


def optimizer(args: argparse.Namespace) -> None:
    """Compare torch's versions of AdamW on parameters of the model's size."""
    import torch

    size = 1 << (10 if args.dry_run else 29)
    print(f"{size / 1e6:.3g}M parameters in 64 tensors, float32\n")
    print("| AdamW | ms | peak MiB above the states |\n|---|---|---|")
    for name, options in {"fused": {"fused": True}, "foreach": {"foreach": True}, "plain": {"foreach": False}}.items():
        parameters = [torch.nn.Parameter(torch.zeros(size // 64, device=device())) for _ in range(64)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        adamw = torch.optim.AdamW(parameters, lr=1e-6, **options)
        adamw.step()
        seconds, peak = measured(adamw.step, args.rounds)
        print(f"| {name} | {seconds * 1e3:.2f} | {peak / 2**20:.0f} |")
        del parameters, adamw


def trainer(args: argparse.Namespace, folder: Path) -> tuple[Any, Callable[[], Any], int]:
    """Return (an FSDP2 strategy on one rank, a train step of it, the step's micro-batches)."""
    import train_step

    write_model(args.model, folder, layers=1 if args.dry_run else None, vocabulary=200 if args.dry_run else None)
    lengths = (9, 7, 8, 5) if args.dry_run else train_step.spread_lengths(32, 2048, 4.0)
    rows = 2 if args.dry_run else 8
    dtype = "fp32" if args.dry_run else "bf16"
    job = train_step.Job(model=str(folder), dtype=dtype, lengths=lengths, rows=rows, threads=1)
    strategy, step = train_step.built_step(job, train_step.CONTENDERS["fsdp2"], 0, 1, 0)
    return strategy, step, len(lengths) // rows


def waits(args: argparse.Namespace) -> None:
    """Count the calls of a whole train step in which the host waits for the device."""
    from torch.autograd.profiler import profile

    with tempfile.TemporaryDirectory() as name:
        _, step, micro_batches = trainer(args, Path(name))
        step()
        with profile(use_device="cuda" if device().type == "cuda" else None, use_kineto=True) as recorded:
            step()
    counts = Counter(event.name for event in recorded.function_events if event.name in (*WAITING, WAITED))
    print(f"one step of {micro_batches} micro-batches\n\n| call | times | per micro-batch |\n|---|---|---|")
    for call in (*WAITING, WAITED):
        print(f"| {call} | {counts[call]} | {counts[call] / micro_batches:.1f} |")


def sleep(args: argparse.Namespace) -> None:
    """Time a role's way to the host and back."""
    import torch

    with tempfile.TemporaryDirectory() as name:
        strategy, step, _ = trainer(args, Path(name))
        step()
        away, back, freed = [], [], 0
        for _ in range(args.rounds):
            started = time.perf_counter()
            freed = strategy.sleep()
            away.append(time.perf_counter() - started)
            started = time.perf_counter()
            strategy.wake()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            back.append(time.perf_counter() - started)
    print(f"{freed / 2**30:.2f} GiB leave the device\n\n| way | s | GiB/s |\n|---|---|---|")
    for way, times in {"to the host": away, "back": back}.items():
        seconds = median(times)
        print(f"| {way} | {seconds:.4f} | {freed / 2**30 / seconds:.1f} |")


PARTS = {
    "machine": machine,
    "head": head,
    "attention": attention,
    "optimizer": optimizer,
    "waits": waits,
    "sleep": sleep,
}


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="one of the sizes that `roll plan` knows")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, as small as it gets")
    args = parser.parse_args()
    PARTS[args.part](args)


if __name__ == "__main__":
    main()
