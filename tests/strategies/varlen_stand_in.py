"""What `torch.nn.attention.varlen.varlen_attn` says it computes, in plain operators on any device and in any type."""

from __future__ import annotations

import contextlib

import torch

from roll.strategies.attention import attention, varlen_kernel


def stand_in(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    """The kernel's result by a dense mask; refuses what the kernel refuses."""
    size = query.shape[-1]
    assert key.shape[-1] == value.shape[-1] == size, "one size of heads"
    assert size % 8 == 0, "its size is a multiple of 8"
    assert size <= 192 or size == 256, "sizes whose backward pass every card has"
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert enable_gqa or query.shape[1] == key.shape[1]
    lengths = cu_seq_q.diff()
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert cu_seq_q[0] == 0
    assert cu_seq_q[-1] == len(query) == len(key) == len(value)
    assert max_q == max_k == int(lengths.max())
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    places = torch.arange(len(query))
    ahead = places - places[:, None]
    left, right = window_size
    seen = (rows[:, None] == rows) & ((left < 0) | (-ahead <= left)) & ((right < 0) | (ahead <= right))
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return torch.einsum("hqk,khe->qhe", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


@contextlib.contextmanager
def kernel_replaced():
    """Inside, every line of rows goes to the kernel, which is the stand-in; yields the arguments of its calls."""
    calls = []

    def spy(*tensors, **options):
        calls.append((tensors, options))
        return stand_in(*tensors, **options)

    before = attention.has_varlen_kernel, varlen_kernel.torch_varlen.varlen_attn
    attention.has_varlen_kernel, varlen_kernel.torch_varlen.varlen_attn = (lambda *_: True), spy
    try:
        yield calls
    finally:
        attention.has_varlen_kernel, varlen_kernel.torch_varlen.varlen_attn = before
