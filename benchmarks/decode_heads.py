"""The responses of a step of the quickstart, with keys and values repeated for each query head and shared by them.

    OMP_NUM_THREADS=1 python benchmarks/decode_heads.py

Both engines are in this process, take the same requests in turns, and must give the same tokens and log-probs to the
last bit. Figures are processor seconds, which other jobs on the machine change less than time.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def engines(model: str) -> dict[str, Any]:
    from roll.configs.schema.worker_config import ModelArgs
    from roll.strategies.engines.hf.hf_infer import HfInfer
    from roll.strategies.engines.hf.shared_heads import share_heads
    from roll.strategies.training.pretrained import DTYPES, context_length, load_causal_lm

    result = {}
    for name in ("repeated", "shared"):
        loaded = load_causal_lm(ModelArgs(model_name_or_path=model), DTYPES["fp32"])
        if name == "shared":
            share_heads(loaded)
        limit = context_length(loaded)
        result[name] = HfInfer(loaded, eos_token_ids=(), pad_token_id=0, max_running_requests=128, max_context=limit)
        result[name]._decode_step = None  # its own decode steps never repeat them
    return result


def requests(args: argparse.Namespace, round_: int) -> list[Any]:
    """Return `prompts` x `group` requests; responses of a group share their prompt, prompts differ in length."""
    import numpy as np

    from roll.strategies.base import Request, SamplingParams

    rng = np.random.default_rng(round_)
    prompts = [tuple(rng.integers(5, 90, args.tokens - i % 7).tolist()) for i in range(args.prompts)]
    params = SamplingParams(max_new_tokens=args.response)
    return [
        Request(id=f"{i}-{j}", prompt_ids=prompt, params=params, seed=1000 * i + j, order=(i, j, 0), affinity=str(i))
        for i, prompt in enumerate(prompts)
        for j in range(args.group)
    ]


def main() -> None:
    from roll.utils.models import smollm2_path

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(smollm2_path()), help="default: that of the quickstart")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8, help="responses of a prompt")
    parser.add_argument("--tokens", type=int, default=81, help="of the longest prompt")
    parser.add_argument("--response", type=int, default=6, help="tokens of a response")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    both = engines(args.model)
    seconds: dict[str, list[float]] = {name: [] for name in both}
    equal = True
    for round_ in range(args.rounds + 1):  # the first is a warm-up
        answers = []
        for name in sorted(both, reverse=bool(round_ % 2)):
            engine, begun = both[name], time.process_time()
            engine.submit(requests(args, round_))
            done = engine.poll(args.response)
            if round_:
                seconds[name].append(time.process_time() - begun)
            answers.append(sorted((c.id, c.token_ids, c.logprobs) for c in done))
        equal &= answers[0] == answers[1] and len(answers[0]) == args.prompts * args.group
    ratio = median(old / new for old, new in zip(seconds["repeated"], seconds["shared"], strict=True))
    print(f"{args.prompts} x {args.group} responses of {args.response} tokens, {args.rounds} rounds\n")
    print("| keys and values | processor s | of the rounds |\n|---|---|---|")
    for name, times in seconds.items():
        print(f"| {name} | {median(times):.3f} | {min(times):.3f} to {max(times):.3f} |")
    print(f"\nrepeated / shared, median of the rounds: {ratio:.2f}; all tokens and log-probs equal: {equal}")


if __name__ == "__main__":
    main()
