"""The layout contract on Megatron: every way to share a model gives the numbers of a plain transformers loop."""

from __future__ import annotations

import json

import pytest
from layout_contract import CP2, EP2, OVERLAP, PACKED, PLAIN, PP2, SP, TP2, VP2, check_layout, check_layouts
from tiny_models import build_tiny_model
from train_contract import make_batch

LAYOUTS = {
    "one rank": (1, {}),
    "one rank, whole optimizer": (1, PLAIN),
    "data 2": (2, {}),
    "data 2, whole optimizer": (2, PLAIN),
    "data 2, overlapped": (2, OVERLAP),
    "data 2, overlapped sums, whole optimizer": (2, {"overlap_grad_reduce": True, **PLAIN}),
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


SOME = ("one rank", "data 2", "tensor 2, sequence", "pipeline 2", "context 2")
VIRTUAL = {"pipeline 2 x 2 virtual stages": (2, {}), "overlapped": (4, OVERLAP), "tensor 2": (4, {**TP2, **SP})}
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
RECOMPUTE = {
    "off": ({}, {"disable_gradient_checkpointing": True}),
    "full": ({"recompute_granularity": "full"}, {}),
    "blocks": ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}, {}),
    "attention": ({"recompute_granularity": "selective"}, {}),
    "mlp and norms": ({"recompute_granularity": "selective", "recompute_modules": ("mlp", "layernorm")}, {}),
}
BUDGETS = {
    "use_dynamic_batching_in_train": True,
    "max_tokens_per_microbatch_in_train": 26,
    "use_dynamic_batching_in_infer": True,
    "max_tokens_per_microbatch_in_infer": 40,
}
UNTIED = {"tie_word_embeddings": False, "num_attention_heads": 8, "num_key_value_heads": 8}


def every_case():
    """(name, ranks, options of the backend, the model, changes of the role)"""
    for layout, (world, options) in LAYOUTS.items():
        yield f"llama: {layout}", world, options, {}, {}
    for layout in SOME:
        for family in ("qwen2", "qwen3"):
            yield f"{family}: {layout}", *LAYOUTS[layout], {"family": family}, {}
    for layout in (*SOME, "tensor 2 x context 2, sequence"):
        for family in ("llama", "qwen3_moe"):
            yield f"{family}, packed: {layout}", *LAYOUTS[layout], {"family": family}, PACKED
    # Three micro-batches: a padding micro-batch makes them a multiple of the stages.
    for layout, (world, options) in VIRTUAL.items():
        options = {**VP2, **options}
        for name, changes in (("interleaved", {}), ("interleaved, packed", PACKED)):
            yield f"{name}: {layout}", world, options, {"layers": 4}, changes
    for dispatcher in ("alltoall", "allgather"):
        sent = {"moe_token_dispatcher_type": dispatcher}
        for layout, (world, options) in EXPERTS.items():
            yield f"experts, {dispatcher}: {layout}", world, {**options, **sent}, {"family": "qwen3_moe"}, {}
        yield f"mixtral, {dispatcher}", 2, {**EP2, **sent}, {"family": "mixtral"}, PACKED
    for kind, (options, model) in RECOMPUTE.items():
        yield f"recomputed: {kind}", 2, {**TP2, **options}, {}, {"model": model}
    yield "recomputed experts", 2, {**EP2, "moe_layer_recompute": True}, {"family": "qwen3_moe"}, {}
    for layout in ("data 2", "pipeline 2", "tensor 2 x context 2, sequence"):
        for packed in (False, True):
            worker = {**BUDGETS, "use_sequence_packing": packed}
            yield f"token budget, packed {packed}: {layout}", *LAYOUTS[layout], {}, {"worker": worker}
    # The padding token's embedding gets no gradient where the token is an input, as in transformers.
    padding = {"pad_token_id": int(make_batch().token_ids[1])}
    for layout in ("one rank", "tensor 2", "tensor 2, sequence", "pipeline 2", "context 2"):
        world, options = (2, TP2) if layout == "tensor 2" else LAYOUTS[layout]
        for name, changes in (("padding token", {}), ("padding token, packed", PACKED)):
            yield f"{name}: {layout}", world, options, padding, changes
    first = {"num_layers_in_first_pipeline_stage": 1, "deallocate_pipeline_outputs": True}
    letters = {"pipeline_model_parallel_layout": "Etttt|L"}
    for name, uneven in (("a short first stage", first), ("stages by letters", letters)):
        yield name, 2, {**PP2, "additional_configs": uneven}, {"layers": 4}, {}
    yield "a separate head, and a vocabulary that needs padding", 4, {"tensor_model_parallel_size": 4}, UNTIED, {}
    yield "more tensor ranks than key heads", 4, {"tensor_model_parallel_size": 4, **SP}, {}, {}


CELLS = {
    # What a family brings (biases, norms of queries and keys, experts) meets what a layout divides in the other cells.
    *(f"qwen2: {layout}" for layout in ("one rank", "data 2", "context 2")),
    *(f"qwen3: {layout}" for layout in ("one rank", "data 2", "pipeline 2")),
    *(f"llama, packed: {layout}" for layout in ("one rank", "tensor 2, sequence", "pipeline 2")),
    *(f"qwen3_moe, packed: {layout}" for layout in ("data 2", "context 2", "tensor 2 x context 2, sequence")),
    "interleaved: pipeline 2 x 2 virtual stages", "interleaved, packed: overlapped", "interleaved: tensor 2",
    *(f"experts, alltoall: {layout}" for layout in (
        "data 2", "tensor 2, whole experts", "expert 2, whole optimizer", "expert 2 over tensor ranks",
        "expert 2 x pipeline 2",
    )),
    *(f"experts, allgather: {layout}" for layout in (
        "one rank", "tensor 2", "pipeline 2", "expert 2, overlapped", "experts over data ranks", "expert 2 x data 2",
        "expert 2 x tensor 2",
    )),
}  # fmt: skip
"""What only `make evidence` runs: see tests/thinned.py."""


def groups(chosen):
    """Cases of the same parallel sizes, whose roles share a process's groups: sizes -> cases."""
    found = {}
    for name, world, options, model, changes in every_case():
        if (name in CELLS) is chosen:
            sizes = {key: size for key, size in options.items() if key.endswith("_parallel_size")}
            parts = sorted(f"{key.removesuffix('_parallel_size')} {size}" for key, size in sizes.items())
            found.setdefault(", ".join([f"ranks {world}", *parts]), []).append((name, world, options, model, changes))
    return found


GROUPS, OTHER_CELLS = groups(False), groups(True)


def check_group(ranks, model_of, group):
    cases = {name: (model_of(**model), options, changes) for name, _, options, model, changes in group}
    check_layouts(ranks, "megatron_train", group[0][1], cases)


@pytest.mark.parametrize("sizes", GROUPS)
def test_roles_of_every_layout_train_like_a_plain_loop(ranks, model_of, sizes):
    check_group(ranks, model_of, GROUPS[sizes])


@pytest.mark.parametrize("sizes", OTHER_CELLS)
def test_so_do_those_of_the_other_cells(ranks, model_of, sizes):
    check_group(ranks, model_of, OTHER_CELLS[sizes])


def test_two_tensor_ranks_train_like_a_plain_loop(ranks, model_of):
    check_layout(ranks, model_of("llama"), "megatron_train", TP2, 2)


def test_padding_counted_from_the_end_and_with_a_separate_head(ranks, tmp_path):
    # As old configurations have it; torch counts back from the vocabulary's end.
    model = build_tiny_model(tmp_path / "model", "qwen2", tie_word_embeddings=False)
    config = json.loads((model / "config.json").read_text())
    config["pad_token_id"] = int(make_batch().token_ids[1]) - config["vocab_size"]
    (model / "config.json").write_text(json.dumps(config))
    check_layout(ranks, model, "megatron_train", {}, 1)
