"""Weights on their way to engines: cast before they are gathered, few collectives, the same numbers."""

from __future__ import annotations

import pytest
import torch
from layout_contract import layout_spec
from train_contract import LOSS, build, make_batch

from roll.distributed.byte_account import counting
from roll.distributed.transports.shm_places import locate, share
from roll.strategies.hf import gather
from roll.strategies.hf.gather import gathered, sent_types


def sent(info, spec):
    """After a step: what a rank sends to an engine in bf16, to one in fp32, bytes gathered, collectives, whole ones."""
    strategy, calls = build(spec, info), []
    strategy.train_step(make_batch(), LOSS)
    original = gather._all_gather
    gather._all_gather = lambda *args, **options: calls.append(args) or original(*args, **options)
    with counting() as account:
        narrow = {name: tensor.clone() for name, tensor in strategy.named_weights(dtype=torch.bfloat16)}
    bytes_of_narrow, collectives = account.gathered, len(calls)
    gather._all_gather = original
    wide = {name: tensor.clone() for name, tensor in strategy.named_weights(dtype=torch.float32)}
    plain = {name: tensor.clone() for name, tensor in strategy.named_weights()}
    own = dict(strategy._model.lm.named_parameters()) if hasattr(strategy, "_model") else {}
    one_by_one = {n: p.full_tensor() for n, p in own.items() if hasattr(p, "full_tensor")}
    return narrow, wide, plain, one_by_one, bytes_of_narrow, collectives


LORA = {"lora_rank": 4, "lora_alpha": 8.0, "lora_target": ("q_proj", "v_proj")}
BF16 = {"dtype": "bf16"}
CASES = {
    "FSDP2": ("fsdp2_train", 2, {}, {}),
    "FSDP2, two copies of two shards": ("fsdp2_train", 4, {"fsdp_size": 2}, {}),
    "FSDP2, adapters": ("fsdp2_train", 2, {}, LORA),
    "ZeRO 2": ("deepspeed_train", 2, {"zero_optimization": {"stage": 2}}, {}),
    "ZeRO 2 in bf16": ("deepspeed_train", 2, {"zero_optimization": {"stage": 2}}, BF16),
    "ZeRO 3 in bf16": ("deepspeed_train", 2, {"zero_optimization": {"stage": 3}}, BF16),
    "ZeRO 3, adapters": ("deepspeed_train", 2, {"zero_optimization": {"stage": 3}}, LORA),
    "Megatron": ("megatron_train", 2, {"tensor_model_parallel_size": 2}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_sent_is_the_cast_of_what_is_trained(ranks, model_of, case):
    strategy, world, options, model = CASES[case]
    spec = layout_spec(model_of("qwen2", vocab_size=107), strategy, options, model=model)
    narrow, wide, plain, one_by_one, num_bytes, collectives = ranks.run(sent, world, spec)[0]
    assert list(narrow) == list(wide) == list(plain)
    assert all(torch.equal(wide[name], plain[name]) for name in plain)
    for name, tensor in plain.items():
        assert narrow[name].dtype == torch.bfloat16
        assert torch.equal(narrow[name], tensor.bfloat16()), name
    assert all(torch.equal(plain[name], tensor) for name, tensor in one_by_one.items() if name in plain)
    size = sum(tensor.nbytes for tensor in narrow.values())
    if case != "ZeRO 3, adapters":  # computes in float32, and gathers what computes
        # A model of 90 kB: matrices of adapters, which stay in float32, and gaps between tensors weigh a lot in it.
        assert num_bytes <= (1.4 if model is LORA else 1.1) * size
    if strategy == "fsdp2_train":
        assert collectives == 1
        assert num_bytes >= size
    if case.startswith("ZeRO 2"):
        assert num_bytes == 0  # every rank has the weights that compute


def test_one_rank_on_the_host_sends_from_where_it_trains(model_of):
    spec = layout_spec(model_of("qwen2", vocab_size=107), "fsdp2_train", {})
    strategy, plain = build(spec), build(spec)
    assert strategy.resident_weights(torch.bfloat16) == [], "what is cast on the way has no memory that lasts"
    assert share(strategy.resident_weights(torch.float32)) > 0
    for trained in (strategy, plain):
        trained.train_step(make_batch(), LOSS)
    expected = dict(plain.named_weights())
    for name, tensor in strategy.named_weights(dtype=torch.float32):
        place = locate(tensor)
        assert place is not None, name
        assert place.stays
        assert torch.equal(tensor, expected[name]), name


def test_merged_adapters_have_no_memory_that_lasts(model_of):
    spec = layout_spec(model_of("qwen2", vocab_size=107), "fsdp2_train", {}, model=LORA)
    assert build(spec).resident_weights() == ()


def test_what_is_kept_in_float32_and_what_is_not_a_weight_is_not_rounded():
    class Model(torch.nn.Module):
        _keep_in_fp32_modules_strict = ("router",)

        def __init__(self):
            super().__init__()
            self.router = torch.nn.Linear(2, 2)
            self.mlp = torch.nn.Linear(2, 2)
            self.register_buffer("bias", torch.ones(2))

    model = Model()
    types = sent_types(model, torch.bfloat16)
    named = [*model.named_parameters(), *model.named_buffers()]
    found = dict(gathered((name, tensor, types(name, tensor)) for name, tensor in named))
    narrow = {name for name, tensor in found.items() if tensor.dtype == torch.bfloat16}
    assert narrow == {"mlp.weight", "mlp.bias"}
    assert all(types(name, tensor) is None for name, tensor in model.named_parameters() if "router" in name)
    wide = sent_types(model.bfloat16(), torch.float32)
    assert all(wide(name, tensor) is None for name, tensor in model.named_parameters())  # nothing grows on its way
