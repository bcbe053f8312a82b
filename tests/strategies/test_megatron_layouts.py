"""The layout contract on Megatron: every way to share a model gives the numbers of a plain transformers loop."""

from __future__ import annotations

import pytest
from layout_contract import check_layout

TP2, PP2, CP2, EP2 = (
    {f"{kind}_parallel_size": 2} for kind in ("tensor_model", "pipeline_model", "context", "expert_model")
)
SP = {"sequence_parallel": True}
PLAIN = {"use_distributed_optimizer": False}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
PACKED = {"worker": {"use_sequence_packing": True}}

LAYOUTS = {
    "one rank": (1, {}),
    "one rank, whole optimizer": (1, PLAIN),
    "data 2": (2, {}),
    "data 2, whole optimizer": (2, PLAIN),
    "data 2, overlapped": (2, OVERLAP),
    "data 2, overlapped sums, whole optimizer": (2, {"overlap_grad_reduce": True, **PLAIN}),
    "tensor 2": (2, TP2),
    "tensor 2, whole optimizer": (2, {**TP2, **PLAIN}),
    "tensor 2, sequence": (2, {**TP2, **SP}),
    "pipeline 2": (2, PP2),
    "pipeline 2, whole optimizer": (2, {**PP2, **PLAIN}),
    "context 2": (2, CP2),
    "tensor 2 x pipeline 2": (4, {**TP2, **PP2}),
    "tensor 2 x data 2, sequence, overlapped": (4, {**TP2, **SP, **OVERLAP}),
    "tensor 2 x context 2, sequence": (4, {**TP2, **CP2, **SP}),
    "pipeline 2 x data 2, overlapped": (4, {**PP2, **OVERLAP}),
    "pipeline 2 x context 2": (4, {**PP2, **CP2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_llama_in_every_layout(ranks, model_of, layout):
    world, options = LAYOUTS[layout]
    check_layout(ranks, model_of("llama"), "megatron_train", options, world)


@pytest.mark.parametrize("layout", ["one rank", "data 2", "tensor 2, sequence", "pipeline 2", "context 2"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_other_families(ranks, model_of, family, layout):
    world, options = LAYOUTS[layout]
    check_layout(ranks, model_of(family), "megatron_train", options, world)


@pytest.mark.parametrize(
    "layout", ["one rank", "data 2", "tensor 2, sequence", "pipeline 2", "context 2", "tensor 2 x context 2, sequence"]
)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_packed_rows(ranks, model_of, family, layout):
    world, options = LAYOUTS[layout]
    check_layout(ranks, model_of(family), "megatron_train", options, world, **PACKED)


VIRTUAL = {"pipeline 2 x 2 virtual stages": (2, {}), "overlapped": (4, OVERLAP), "tensor 2": (4, {**TP2, **SP})}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", VIRTUAL)
def test_interleaved_stages(ranks, model_of, layout, packed):
    # Three micro-batches: a padding micro-batch makes them a multiple of the stages.
    world, options = VIRTUAL[layout]
    options = {**PP2, "virtual_pipeline_model_parallel_size": 2, **options}
    check_layout(ranks, model_of("llama", layers=4), "megatron_train", options, world, **(PACKED if packed else {}))


EXPERTS = {
    "one rank": (1, {}),
    "data 2": (2, {}),
    "tensor 2": (2, {**TP2, **SP}),
    "tensor 2, whole experts": (2, {**TP2, **SP, "expert_tensor_parallel_size": 1}),
    "pipeline 2": (2, PP2),
    "expert 2": (2, EP2),
    "expert 2, whole optimizer": (2, {**EP2, **PLAIN}),
    "expert 2, overlapped": (2, {**EP2, **OVERLAP}),
    "expert 2 over tensor ranks": (2, {**TP2, **SP, **EP2, "expert_tensor_parallel_size": 1}),
    "experts over data ranks": (2, {"expert_tensor_parallel_size": 2}),
    "expert 2 x pipeline 2": (4, {**EP2, **PP2}),
    "expert 2 x data 2": (4, EP2),
    "expert 2 x tensor 2": (4, {**EP2, **TP2, **SP}),
}


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("layout", EXPERTS)
def test_mixture_of_experts(ranks, model_of, layout, dispatcher):
    world, options = EXPERTS[layout]
    options = {**options, "moe_token_dispatcher_type": dispatcher}
    check_layout(ranks, model_of("qwen3_moe"), "megatron_train", options, world)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_mixtral_with_packed_rows(ranks, model_of, dispatcher):
    options = {**EP2, "moe_token_dispatcher_type": dispatcher}
    check_layout(ranks, model_of("mixtral"), "megatron_train", options, 2, **PACKED)


RECOMPUTE = {
    "off": ({}, {"disable_gradient_checkpointing": True}),
    "full": ({"recompute_granularity": "full"}, {}),
    "blocks": ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}, {}),
    "attention": ({"recompute_granularity": "selective"}, {}),
    "mlp and norms": ({"recompute_granularity": "selective", "recompute_modules": ("mlp", "layernorm")}, {}),
}


@pytest.mark.parametrize("kind", RECOMPUTE)
def test_recomputation_changes_no_number(ranks, model_of, kind):
    options, model = RECOMPUTE[kind]
    check_layout(ranks, model_of("llama"), "megatron_train", {**TP2, **options}, 2, model=model)


def test_recomputed_experts(ranks, model_of):
    options = {**EP2, "moe_layer_recompute": True}
    check_layout(ranks, model_of("qwen3_moe"), "megatron_train", options, 2)


@pytest.mark.parametrize("layout", ["data 2", "pipeline 2", "tensor 2 x context 2, sequence"])
def test_micro_batches_by_token_budget(ranks, model_of, layout):
    world, options = LAYOUTS[layout]
    worker = {
        "use_dynamic_batching_in_train": True,
        "max_tokens_per_microbatch_in_train": 26,
        "use_dynamic_batching_in_infer": True,
        "max_tokens_per_microbatch_in_infer": 40,
    }
    for packed in (False, True):
        changes = {**worker, "use_sequence_packing": packed}
        check_layout(ranks, model_of("llama"), "megatron_train", options, world, worker=changes)


def test_separate_head_and_vocabulary_that_needs_padding(ranks, model_of):
    model = model_of("llama", tie_word_embeddings=False, num_attention_heads=8, num_key_value_heads=8)
    options = {"tensor_model_parallel_size": 4}
    check_layout(ranks, model, "megatron_train", options, 4)


def test_more_tensor_ranks_than_key_heads(ranks, model_of):
    check_layout(ranks, model_of("llama"), "megatron_train", {"tensor_model_parallel_size": 4, **SP}, 4)
