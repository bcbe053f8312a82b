"""Sequences shared by ranks: the layout contract, forward passes, critics, and what is refused."""

from __future__ import annotations

import pytest
import torch
from layout_contract import FAMILIES, check_layout, check_layouts, refusal
from tiny_models import build_tiny_model
from train_contract import build, make_batch, make_info, make_spec, with_worker

from roll.strategies.training.micro import lay_out, take_shard

PACKED = {"use_sequence_packing": True}
ROWS = {"padded": {}, "packed": PACKED}


def ulysses(size, **model):
    return {"model": {"ulysses_size": size, **model}}


# --- the numbers -----------------------------------------------------------------------------------------------------


def test_two_ranks_share_every_sequence(ranks, model_of):
    cases = {
        f"{family}, {name}": (model_of(family, **changes), {}, {"worker": worker, **ulysses(2)})
        for family, changes in FAMILIES.items()
        for name, worker in ROWS.items()
    }
    check_layouts(ranks, "fsdp2_train", 2, cases)


def test_four_ranks_are_two_pairs_with_rows_of_their_own(ranks, model_of):
    cases = {
        f"{name}, {options}": (model_of("qwen2"), options, {"worker": worker, **ulysses(2)})
        for options in ({}, {"fsdp_size": 2})
        for name, worker in ROWS.items()
    }
    budget = {"use_dynamic_batching_in_train": True, "max_tokens_per_microbatch_in_train": 24, **PACKED}
    changes = {"worker": budget, **ulysses(2, disable_gradient_checkpointing=True)}
    cases["a token budget without recomputation"] = (model_of("llama"), {}, changes)
    check_layouts(ranks, "fsdp2_train", 4, cases)


def test_more_ranks_than_key_heads_and_more_than_scored_tokens(ranks, model_of):
    single = {"per_device_train_batch_size": 1}
    check_layout(ranks, model_of("llama"), "fsdp2_train", {}, 4, training=single, **ulysses(4))


def test_sequences_shared_under_zero(ranks, model_of):
    pytest.importorskip("deepspeed")
    changes = {"worker": PACKED, **ulysses(2)}
    stages = {f"stage {stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)}
    cases = {stage: (model_of("llama"), options, changes) for stage, options in stages.items()}
    check_layouts(ranks, "deepspeed_train", 2, cases)


def scored(info, spec, output):
    strategy = build(spec, info)
    if output == "values":
        head = strategy._model.value_head.weight
        whole = torch.randn(head.shape, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            head.copy_(whole) if info.world_size == 1 else head.copy_(_like(whole, head))
    return strategy.layout, getattr(strategy.forward(make_batch(), (output,)), output)


def _like(whole, sharded):
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, sharded.device_mesh, sharded.placements)


@pytest.mark.parametrize("changes", [{"strategy": "fsdp2_infer", "trains": False}, {"kind": "value"}])
def test_forward_passes_and_critics_give_the_numbers_of_one_rank(ranks, model_of, changes):
    output = "values" if changes.get("kind") == "value" else "logprobs"
    spec = make_spec(model_of("llama"), **changes)
    shared = make_spec(model_of("llama"), **changes, model={"ulysses_size": 2})
    ((_, expected),) = ranks.run(scored, 1, spec, output)
    answers = ranks.run(scored, 2, with_worker(shared, sequence_length_round_in_infer=3), output)
    assert [(layout.dp_rank, layout.dp_size, layout.collects) for layout, _ in answers] == [(0, 1, True), (0, 1, False)]
    assert expected.abs().max() > 0.1
    for _, found in answers:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


# --- how it is cut ---------------------------------------------------------------------------------------------------


def test_shards_hold_every_token_once_and_rows_may_be_cut_anywhere():
    batch, shards = make_batch(), []
    whole = lay_out(batch, torch.device("cpu"), packed=True, multiple=3)
    assert (whole.padding, whole.segments) == (1, (7, 12, 5, 9, 20, 3, 1))
    for rank in range(3):
        shards.append(take_shard(whole, rank, 3)[0])
    assert torch.cat([part.ids for part in shards], dim=1).equal(whole.ids)
    assert torch.cat([part.positions for part in shards], dim=1).equal(whole.positions)
    assert torch.cat([part.targets for part in shards]).equal(whole.targets)
    at = torch.cat([part.index + rank * 19 for rank, part in enumerate(shards)])
    assert at.equal(whole.index)
    assert {part.segments for part in shards} == {whole.segments}


def places(info, spec):
    strategy = build(spec, info)
    return strategy.layout.dp_rank, strategy.layout.collects, strategy._peers.most(info.rank)


def test_consecutive_ranks_share_rows_and_sums_go_over_pairs(ranks, model_of):
    spec = make_spec(model_of("llama"), model={"ulysses_size": 2})
    # Ranks 0 and 2 hold first shards, 1 and 3 second ones: each pair sees all rows once.
    assert ranks.run(places, 4, spec) == [(0, True, 2), (0, False, 3), (1, True, 2), (1, False, 3)]


# --- what can't be ---------------------------------------------------------------------------------------------------


def test_a_size_that_does_not_divide_the_heads_is_refused_with_the_numbers(model_of):
    # Without a process group: before anything is loaded. A size and the role's ranks: test_configs_layouts.py.
    with pytest.raises(ValueError, match=r"actor_train.model_args.ulysses_size: got 3.*a divisor of the 4 attention"):
        build(make_spec(model_of("llama"), model={"ulysses_size": 3}), make_info(0, 3))


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [("gemma2", {"sliding_window": 4}, "softcap=50.0"), ("qwen3_next", {}, "needs its rows whole")],
)
def test_models_that_mix_tokens_in_other_ways_are_refused(ranks, tmp_path, family, options, message):
    spec = make_spec(build_tiny_model(tmp_path, family, **options), model={"ulysses_size": 2})
    for answer in ranks.run(refusal, 2, spec):
        assert message in answer
        assert answer.endswith("Write model_args.ulysses_size: 1")
