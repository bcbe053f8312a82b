"""Plain-Python references for the tests: float64, one loop per definition, no tensors inside."""

from __future__ import annotations

import math
import statistics

import torch
from hypothesis import strategies as st

SEEDS = st.integers(0, 2**31 - 1)


def draw(seed: int, *shape: int, dtype=torch.float64, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(scale).to(dtype)


def draw_mask(seed: int, rows: int, width: int, share: float = 0.7) -> torch.Tensor:
    return torch.rand(rows, width, generator=torch.Generator().manual_seed(seed + 1)) < share


def draw_index(seed: int, rows: int, groups: int) -> torch.Tensor:
    return torch.randint(groups, (rows,), generator=torch.Generator().manual_seed(seed + 2))


def poison(values: torch.Tensor, mask: torch.Tensor, junk: float) -> torch.Tensor:
    """The same tensor with junk wherever the mask is False."""
    return torch.where(mask, values, torch.full_like(values, junk))


def members(index: torch.Tensor) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(index.tolist()):
        groups.setdefault(group, []).append(row)
    return groups


def reference_gae(rewards, values, mask, gamma, lam):
    """A_t = sum_l (gamma lam)^l delta_{t+l}, straight from the definition, over each row's action tokens."""
    advantages = torch.zeros(mask.shape, dtype=torch.float64)
    for row in range(mask.shape[0]):
        where = [t for t in range(mask.shape[1]) if mask[row, t]]
        r = [float(rewards[row, t]) for t in where]
        v = [float(values[row, t]) for t in where] + [0.0]
        delta = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(where))]
        for i, t in enumerate(where):
            advantages[row, t] = sum((gamma * lam) ** j * delta[i + j] for j in range(len(where) - i))
    returns = torch.where(mask, advantages + values.double(), torch.zeros((), dtype=torch.float64))
    return advantages, returns


def reference_grouped(rewards, index, kind, lengths=None, eps=1e-6):
    r = [float(x) for x in rewards]
    out = [0.0] * len(r)
    signal = 0
    for rows in members(index).values():
        values = [r[i] for i in rows]
        if len(set(values)) > 1:
            signal += len(rows)
        mean = math.fsum(values) / len(values)
        std = statistics.stdev(values) if len(values) > 1 else 0.0
        for i in rows:
            others = [r[j] for j in rows if j != i]
            if kind == "grpo":
                out[i] = (r[i] - mean) / (std + eps)
            elif kind == "rloo":
                out[i] = r[i] - math.fsum(others) / len(others) if others else 0.0
            elif kind == "opo":
                total = sum(int(lengths[j]) for j in rows)
                baseline = sum(int(lengths[j]) * r[j] for j in rows) / total if total else mean
                out[i] = r[i] - baseline
            else:
                out[i] = r[i] - mean
    if kind == "gpg":
        out = [x * len(r) / max(signal, 1) for x in out]
    return torch.tensor(out, dtype=torch.float64)
