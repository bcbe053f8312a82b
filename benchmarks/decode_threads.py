"""Decoding with `hf_infer` on a CPU: small passes on one thread, as it does, against all passes on all threads.

    OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE python benchmarks/decode_threads.py

The model is the random one of `rollout_vs_trl.py`. Both engines are in this process and take the same requests in
turns. With `--tail` few responses are long.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from trl_task import Task, write_files  # noqa: E402 - beside this file


def engines(folder: Path) -> dict[str, Any]:
    import torch

    from roll.configs.schema.worker_config import ModelArgs
    from roll.strategies.hf.hf_model import load_causal_lm
    from roll.strategies.hf.shared_heads import share_heads
    from roll.strategies.hf.threads import ForwardThreads
    from roll.strategies.hf_infer import HfInfer

    class AllThreads(ForwardThreads):
        def shares(self, tokens: int) -> bool:
            del tokens
            return True

    found = {}
    for name, threads in (("all threads", AllThreads), ("by size", ForwardThreads)):
        model = load_causal_lm(ModelArgs(model_name_or_path=str(folder / "model")), torch.float32)
        share_heads(model)
        found[name] = HfInfer(model, eos_token_ids=(), pad_token_id=0, max_running_requests=1024, max_context=2048)
        found[name]._threads = threads(model)
    return found


def requests(args: argparse.Namespace, round_: int) -> list[Any]:
    """Responses of one length, or with `tail` of lengths that halve: 1 of the longest, 1 of half of it, 2, 4, ..."""
    import numpy as np

    from roll.strategies.base import Request, SamplingParams

    prompt = tuple(np.random.default_rng(round_).integers(5, 1000, 32).tolist())
    lengths = [max(1, args.response >> i.bit_length()) if args.tail else args.response for i in range(args.rows)]
    return [
        Request(id=str(i), prompt_ids=prompt, params=SamplingParams(max_new_tokens=n), seed=i, order=(i,))
        for i, n in enumerate(lengths)
    ]


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--response", type=int, default=256, help="tokens of the longest response")
    parser.add_argument("--tail", action="store_true", help="few responses are long")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        task = Task(prompts=1, samples=1, prompt_length=1, response_length=1, mean_length=None, threads=1, steps=1)
        write_files(Path(folder), task)
        both = engines(Path(folder))
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in both}
    for round_ in range(args.rounds + 1):  # the first is a warm-up
        for name in sorted(both, reverse=bool(round_ % 2)):
            begun, computed = time.perf_counter(), time.process_time()
            both[name].submit(requests(args, round_))
            assert len(both[name].poll(args.response)) == args.rows
            if round_:
                figures[name].append((time.perf_counter() - begun, time.process_time() - computed))
    sizes = f"{args.rows} responses of up to {args.response} tokens, {args.rounds} rounds"
    print(f"{sizes}; {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}\n")
    print("| passes | s | processor s |\n|---|---|---|")
    for name, rows in figures.items():
        print(f"| {name} | {median(row[0] for row in rows):.2f} | {median(row[1] for row in rows):.2f} |")
    pairs = list(zip(figures["all threads"], figures["by size"], strict=True))
    wall, processor = (median(old[i] / new[i] for old, new in pairs) for i in (0, 1))
    print(f"\nall threads / by size, median of the rounds: {wall:.2f}, in processor seconds {processor:.2f}")


if __name__ == "__main__":
    main()
