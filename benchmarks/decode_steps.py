"""Decoding with `hf_infer` on a CPU as it does it, and without one of the things that make it fast.

    OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=5000 python benchmarks/decode_steps.py

`as it is` takes steps without transformers' modules, small ones on one thread, from weights laid out by input. The
others go through transformers, use all threads for all steps, or leave the weights as they are stored.

The model is the random one of `grpo_vs_trl.py`. All engines are in this process and take the same requests in
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
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from trl_task import Task, write_files  # noqa: E402 - beside this file

AS_IT_IS = "as it is"


def engines(folder: Path) -> dict[str, Any]:
    import torch

    from roll.configs.schema.worker_config import ModelArgs
    from roll.strategies.engines.hf import hf_infer
    from roll.strategies.engines.hf.compute_threads import ForwardThreads
    from roll.strategies.engines.hf.hf_infer import HfInfer
    from roll.strategies.engines.hf.shared_heads import share_heads
    from roll.strategies.training.pretrained import load_causal_lm

    class AllThreads(ForwardThreads):
        def shares(self, tokens: int) -> bool:
            del tokens
            return True

    def engine() -> Any:
        model = load_causal_lm(ModelArgs(model_name_or_path=str(folder / "model")), torch.float32)
        share_heads(model)
        return HfInfer(model, eos_token_ids=(), pad_token_id=0, max_running_requests=1024, max_context=2048)

    with mock.patch.object(hf_infer, "lay_by_input"):
        result = {"weights by output": engine(), "through transformers": engine()}
    result |= {"all threads": engine(), AS_IT_IS: engine()}
    assert result[AS_IT_IS]._decode_step is not None
    result["through transformers"]._decode_step = None
    result["all threads"]._threads = AllThreads(result["all threads"]._model)
    return result


def requests(args: argparse.Namespace, round_: int) -> list[Any]:
    """Return responses of one length, or with `tail` of halving ones: 1 of the longest, 1 of half of it, 2, 4, ..."""
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
        every = engines(Path(folder))
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in every}
    for round_ in range(args.rounds + 1):  # the first is a warm-up
        for name in sorted(every, reverse=bool(round_ % 2)):
            begun, computed = time.perf_counter(), time.process_time()
            every[name].submit(requests(args, round_))
            assert len(every[name].poll(args.response)) == args.rows
            if round_:
                figures[name].append((time.perf_counter() - begun, time.process_time() - computed))
    sizes = f"{args.rows} responses of up to {args.response} tokens, {args.rounds} rounds"
    print(f"{sizes}; {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}\n")
    print(f"| steps | s | processor s | s / {AS_IT_IS} | processor s / {AS_IT_IS} |\n|---|---|---|---|---|")
    for name, rows in figures.items():
        pairs = list(zip(rows, figures[AS_IT_IS], strict=True))
        cells = [median(row[i] for row in rows) for i in (0, 1)]
        cells += [median(row[i] / own[i] for row, own in pairs) for i in (0, 1)]
        print(f"| {name} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")


if __name__ == "__main__":
    main()
