"""All rows of a line in one call: when it is made, what it is told, and that this is the attention of row by row."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from device_syncs import OperatorCounts
from layout_contract import FAMILIES
from megatron_cases import build_part
from test_strategies_attention import LENGTHS, SCALE, connected, shard, tensors, with_gradients
from torch._subclasses.fake_tensor import FakeTensorMode
from train_contract import LOSS, build, make_batch, make_spec, with_worker
from varlen_stand_in import kernel_replaced

from roll.configs.schema.megatron_config import MegatronConfig
from roll.strategies.attention import attention, varlen_kernel
from roll.strategies.attention.attention import split_attention, varlen_attention
from roll.strategies.attention.varlen_kernel import RowPlan, has_varlen_kernel
from roll.strategies.training.logits import HeadRequest
from roll.strategies.training.micro import lay_out

PACKED = {"use_sequence_packing": True}
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
ATTENTION = "torch_attn::_varlen_attn"
PER_ROW = "scaled_dot_product_attention"


@pytest.fixture
def ampere(monkeypatch):
    """A build of torch with flash attention, on a machine with a card that has it; `ampere["card"]` changes it."""
    found = {"card": (8, 0)}
    assert varlen_kernel._has_function()  # asked once, and of torch's own function
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found["card"])
    return found


# --- when ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "dtype", "head_size", "expected"),
    [
        (CUDA, torch.bfloat16, 64, True),
        (CUDA, torch.float16, 256, True),
        (CUDA, torch.bfloat16, 257, False),
        (CUDA, torch.float32, 64, False),
        (CUDA, torch.float64, 64, False),
        (CPU, torch.bfloat16, 64, False),
        (torch.device("meta"), torch.bfloat16, 64, False),
        (torch.device("xpu", 0), torch.bfloat16, 64, False),
    ],
)
def test_half_precision_on_an_accelerator_takes_the_kernel(ampere, device, dtype, head_size, expected):
    assert has_varlen_kernel(device, dtype, head_size) is expected


def test_older_cards_other_builds_and_releases_and_a_switched_off_flash_attention_go_row_by_row(ampere, monkeypatch):
    asked = CUDA, torch.bfloat16, 64
    ampere["card"] = (7, 5)
    assert not has_varlen_kernel(*asked)
    ampere["card"] = (12, 0)
    assert has_varlen_kernel(*asked)
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        assert not has_varlen_kernel(*asked)
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    with monkeypatch.context() as without:
        without.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
        assert not has_varlen_kernel(*asked)

    def causal_only(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, scale=None):
        raise AssertionError("the function of an earlier release isn't called")

    for name, changed in (("hip", "7.1"), ("function", causal_only)):
        with monkeypatch.context() as other:
            other.setattr(
                *((torch.version, name) if name == "hip" else (torch.nn.attention.varlen, "varlen_attn")), changed
            )
            varlen_kernel._has_function.cache_clear()
            assert not has_varlen_kernel(*asked)
    varlen_kernel._has_function.cache_clear()
    assert has_varlen_kernel(*asked)


@contextlib.contextmanager
def autocast_on_cuda():
    """torch.autocast wants a device that is there."""
    before, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    try:
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        yield
    finally:
        torch.set_autocast_enabled("cuda", before)
        torch.set_autocast_dtype("cuda", dtype)


@pytest.mark.parametrize(("size", "padded"), [(64, 64), (70, 72), (192, 192), (200, 256)])
@pytest.mark.usefixtures("ampere")
def test_a_line_of_many_rows_is_one_call_in_the_type_of_autocast_and_asks_the_device_nothing(size, padded, monkeypatch):
    given = []
    function = torch.nn.attention.varlen.varlen_attn
    monkeypatch.setattr(
        torch.nn.attention.varlen,
        "varlen_attn",
        lambda *t, **options: given.append((t[0].shape[-1], t[0].dtype, t[3].dtype)) or function(*t, **options),
    )
    rows = RowPlan([7] * 80)
    with FakeTensorMode(), torch.no_grad(), autocast_on_cuda(), OperatorCounts() as counts:
        query, key, value = (torch.empty(560, heads, size, device="cuda") for heads in (4, 2, 2))
        out = varlen_attention(query, key, value, rows, scale=SCALE, window=3)
    assert (out.shape, out.dtype, out.device.type) == ((560, 4, size), torch.bfloat16, "cuda")
    assert given == [(padded, torch.bfloat16, torch.int32)]
    assert counts.calls[ATTENTION] == 1
    assert counts.syncs == {}
    assert not any(PER_ROW in name for name in counts.calls)


# --- what it is told -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 7, 133, 140, 500])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_the_call_describes_the_attention_of_row_by_row(key_heads, window):
    """Heads of 6 numbers and values of 8, neither of which the kernel takes beside the other."""
    *inputs, outer = tensors(key_heads)
    expected = with_gradients(
        lambda *t: varlen_attention(*t, RowPlan(LENGTHS), scale=SCALE, window=window), *inputs, outer
    )
    with kernel_replaced() as calls:
        found = with_gradients(
            lambda *t: varlen_attention(*t, RowPlan(LENGTHS), scale=SCALE, window=window), *inputs, outer
        )
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    ((_, options),) = calls
    assert options["window_size"] == ((-1, 0) if window in (None, 140, 500) else (window - 1, 0))
    assert options["enable_gqa"] == (key_heads != 4)


def test_where_rows_begin_is_made_once():
    rows = RowPlan((3, 1, 5))
    assert rows.longest == 5
    assert rows.bounds(CPU).tolist() == [0, 3, 4, 9]
    assert rows.bounds(CPU) is rows.bounds(CPU)


def played(path, family_worker=PACKED, **changes):
    """(log-probs before, weights after two steps) of a small trainer."""
    strategy = build(make_spec(path, worker={**family_worker, "use_prefix_sharing": False}, **changes))
    before = strategy.forward(make_batch(), ("logprobs",)).logprobs
    for _ in range(2):
        strategy.train_step(make_batch(), LOSS)
    return before, dict(strategy.named_weights())


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_trainer_learns_with_it_what_it_learns_row_by_row(model_of, family):
    path = model_of(family, **FAMILIES[family])
    expected = played(path)
    with kernel_replaced() as calls:
        found = played(path)
    assert calls
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-5)
    for name, weight in expected[1].items():
        torch.testing.assert_close(found[1][name], weight, rtol=0, atol=1e-4)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_layer_makes_one_call_each_pass_and_never_waits_for_the_device(model_of, monkeypatch, checkpointing):
    """The kernel's own function on tensors without numbers, forward and backward."""
    layers = 3
    spec = make_spec(model_of("llama", layers=layers), model={"disable_gradient_checkpointing": not checkpointing})
    strategy = build(with_worker(spec, **PACKED))
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda *_: True)
    module, layout = strategy._module.to("meta"), lay_out(make_batch(), torch.device("meta"), packed=True)
    with OperatorCounts() as counts:
        module(layout, HeadRequest()).logprobs.sum().backward()
    assert counts.calls[ATTENTION] == layers * (2 if checkpointing else 1)
    assert counts.calls[f"{ATTENTION}_backward"] == layers
    assert counts.syncs == {}
    assert not any(PER_ROW in name for name in counts.calls)
    assert all(parameter.grad is not None for parameter in module.parameters())


# --- several ranks, and Megatron -------------------------------------------------------------------------------------


def split_with_kernel(info, heads, key_heads, window):
    connected(info)
    *inputs, outer = (shard(t, info) for t in tensors(key_heads, heads=heads))
    rows = RowPlan(LENGTHS)

    def attend(*shards):
        lines = (tensor[:, None] for tensor in shards)
        return split_attention(*lines, rows, dist.group.WORLD, scale=SCALE, window=window)[:, 0]

    with kernel_replaced() as calls:
        found = with_gradients(attend, *inputs, outer)
    return found, len(calls)


@pytest.mark.parametrize(("world", "heads", "key_heads", "window"), [(2, 4, 2, 7), (2, 6, 3, None)])
def test_ranks_that_share_a_line_call_it_for_whole_rows_and_some_heads(ranks, world, heads, key_heads, window):
    *inputs, outer = tensors(key_heads, heads=heads)
    whole = with_gradients(
        lambda *t: varlen_attention(*t, RowPlan(LENGTHS), scale=SCALE, window=window), *inputs, outer
    )
    answers = ranks.run(split_with_kernel, world, heads, key_heads, window)
    assert [calls for _, calls in answers] == [1] * world
    for mine, expected in zip(zip(*(found for found, _ in answers), strict=True), whole, strict=True):
        torch.testing.assert_close(torch.cat(mine), expected, rtol=0, atol=1e-12)


def megatron_both_ways(info, path, layout, recompute):
    """[(log-probs, gradient of the projection of layer 0)] row by row and with the kernel, its calls, bounds made."""
    from roll.strategies.megatron.platform import cpu_platform

    results = []
    with cpu_platform():
        (chunk,) = build_part(info, path, MegatronConfig(), trains=True, recompute=recompute)
        chunk.train()  # it recomputes nothing otherwise
        weight = chunk.decoder.layers[0].self_attention.linear_qkv.weight
        for kernel in (False, True):
            weight.grad = None
            with kernel_replaced() if kernel else contextlib.nullcontext([]) as calls:
                logprobs = chunk(layout, layout.positions, HeadRequest()).logprobs
                torch.autograd.backward((logprobs * torch.linspace(-1, 1, len(logprobs))).sum())
            results.append((logprobs.detach(), weight.grad.clone()))
    return results, [given[3].tolist() for given, _ in calls], len({id(given[3]) for given, _ in calls})


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_megatron_calls_it_once_a_layer_with_bounds_of_one_making(ranks, model_of, packed, recompute):
    pytest.importorskip("megatron.core")
    layout = lay_out(make_batch(), CPU, packed=packed)
    ((results, bounds, makings),) = ranks.run(megatron_both_ways, 1, model_of("llama", layers=4), layout, recompute)
    assert bounds == [[0, *itertools.accumulate(layout.spans)]] * (8 if recompute else 4)
    assert makings == 1
    for mine, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-5)
        assert expected.abs().max() > 1e-3
