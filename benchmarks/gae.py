"""Time of generalized advantage estimation, as a scan over chunks and as a loop over tokens.

python benchmarks/gae.py --rows 256 --tokens 8192
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roll.algorithms.advantages import gae

GAMMA, LAM = 0.99, 0.95


def loop_over_tokens(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Compute the definition, one token column at a time."""
    advantages = torch.zeros_like(rewards)
    advantage, value = rewards.new_zeros(len(rewards)), rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + GAMMA * value - values[:, t]
        advantage = torch.where(mask[:, t], delta + GAMMA * LAM * advantage, advantage)
        value = torch.where(mask[:, t], values[:, t], value)
        advantages[:, t] = advantage * mask[:, t]
    return advantages


def best_time(call: Callable[[], object], repeats: int) -> float:
    """Return seconds of the fastest of `repeats` calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(rows: int, tokens: int, repeats: int) -> dict[str, float]:
    """Return seconds of both, and the scan's largest error relative to the loop in float64."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(rows, tokens, generator=generator) for _ in range(2))
    mask = torch.rand(rows, tokens, generator=generator) < 0.8  # a fifth of the tokens is stepped over
    exact = loop_over_tokens(rewards.double(), values.double(), mask)
    advantages = gae(rewards, values, mask, gamma=GAMMA, lam=LAM)[0]
    return {
        "scan_seconds": best_time(lambda: gae(rewards, values, mask, gamma=GAMMA, lam=LAM), repeats),
        "loop_seconds": best_time(lambda: loop_over_tokens(rewards, values, mask), repeats),
        "relative_error": float((advantages - exact).abs().max() / exact.abs().max().clamp(min=1e-30)),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line per figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(arguments)
    for name, value in measure(args.rows, args.tokens, args.repeats).items():
        print(f"{name}: {value:.3g}")


if __name__ == "__main__":
    main()
