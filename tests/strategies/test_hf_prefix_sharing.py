"""Beginnings that rows share, computed once: the numbers of rows by themselves in every layout, and what is refused."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
from layout_contract import FAMILIES, layout_spec, relative
from prefix_rows import answers, batch_of, pairs, turns
from test_hf_packing import REFUSED, sizes_of_passes
from test_strategies_models import ARCHITECTURES, make_model
from tiny_models import build_tiny_model
from torch import nn
from train_contract import LOSS, build, make_batch, make_spec, with_worker

from roll.strategies.base import LossFn, LossTerms, TopK
from roll.strategies.hf.hf_model import PolicyModel
from roll.strategies.hf.prefix_sharing import _share
from roll.strategies.training.logits import HeadRequest
from roll.strategies.training.micro import lay_out, lay_out_tree
from roll.types.metrics import Metrics

OFF, ON, PACKED = {"use_prefix_sharing": False}, {"use_prefix_sharing": True}, {"use_sequence_packing": True}
BATCHES = {"answers": answers, "turns": turns}


# --- the numbers -----------------------------------------------------------------------------------------------------


def surprise(outputs, batch, sizes):
    """A loss in which every output has a gradient and no two tokens the same weight."""
    weighted = sum(column * batch.advantages * (i + 1) for i, column in enumerate(outputs.columns().values()))
    loss = (weighted * batch.loss_mask).sum() / sizes.tokens
    metrics = Metrics()
    metrics.add_sum("loss", float(loss.detach()))
    return LossTerms(loss, metrics)


def played(spec, make, needs=("logprobs", "entropy"), info=None):
    """(outputs before, loss of a step, gradients of all parameters, shapes of the passes)."""
    strategy, batch = build(spec, info), make()
    layout = strategy.layout
    batch = batch.select(list(range(layout.dp_rank, len(batch), layout.dp_size)))
    if spec.kind == "value":
        nn.init.normal_(strategy._model.value_head.weight, generator=torch.Generator().manual_seed(1))
    gradients, shapes = {}, []
    strategy._model.register_forward_pre_hook(lambda _m, args: shapes.append(tuple(args[0].ids.shape)))
    before = strategy.forward(batch, needs)

    def keep(lr):
        named = strategy._model.named_parameters()
        gradients.update((name, strategy._full(p.grad).clone()) for name, p in named if p.grad is not None)
        return 0.0, True

    strategy._apply = keep
    loss = strategy.train_step(batch, LossFn(compute=surprise, needs=needs)).result()["loss"]
    return before, loss, gradients, shapes


def same(mine, theirs, bound=1e-5):
    for name, column in theirs[0].columns().items():
        torch.testing.assert_close(mine[0].columns()[name], column, rtol=0, atol=bound)
    assert mine[1] == pytest.approx(theirs[1], abs=bound)
    assert mine[2].keys() == theirs[2].keys()
    assert max(relative(mine[2][name], gradient) for name, gradient in theirs[2].items()) < bound


def tokens(shapes):
    return sum(rows * width for rows, width in shapes)


@pytest.mark.parametrize(("kind", "recompute"), [("answers", True), ("turns", False)])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_loss_and_gradients_are_those_of_rows_by_themselves(model_of, family, kind, recompute):
    path, model = model_of(family, **FAMILIES[family]), {"disable_gradient_checkpointing": not recompute}
    alone = {"per_device_train_batch_size": 1}
    expected = played(
        make_spec(path, worker={**OFF, "infer_batch_size": 1}, model=model, training=alone), BATCHES[kind]
    )
    for worker in ({}, {**ON, **PACKED}):
        found = played(make_spec(path, worker=worker, model=model), BATCHES[kind])
        same(found, expected)
        assert tokens(found[3]) < 0.7 * tokens(expected[3])


def test_gradients_in_float64_are_those_of_rows_by_themselves():
    # GPT-2 computes in the type of its weights throughout; others have norms and rotary embeddings in float32.
    found, batch, device = [], turns(), torch.device("cpu")
    weights = batch.advantages.double()[batch.action_mask]
    lm = make_model("gpt2", {**ARCHITECTURES["gpt2"], "vocab_size": 90}).double().eval()
    policy = PolicyModel(lm, temperature=0.7)
    for shared in (False, True):
        lm.zero_grad()
        if shared:
            _share(lm.get_decoder(), None, packed=False, half=False)
            layout = lay_out_tree(batch, device)
            out = policy(layout, HeadRequest(entropy=True))
            columns = [column[layout.copies] for column in (out.logprobs, out.entropy)]
        else:
            rows = [policy(lay_out(batch.select([i]), device), HeadRequest(entropy=True)) for i in range(4)]
            columns = [torch.cat([getattr(row, name) for row in rows]) for name in ("logprobs", "entropy")]
        ((columns[0] + 2 * columns[1]) * weights).sum().backward()
        gradients = {name: p.grad.clone() for name, p in lm.named_parameters()}
        found.append([*(column.detach() for column in columns), *gradients.values()])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("changes", [{"kind": "value"}, {"strategy": "fsdp2_infer", "trains": False}])
def test_critics_and_references_give_the_numbers_of_padded_rows(model_of, changes):
    spec, batch = make_spec(model_of("llama"), **changes), answers()
    if changes.get("kind") == "value":
        same(played(spec, answers, ("values",)), played(with_worker(spec, **OFF), answers, ("values",)))
        return
    needs = ("logprobs", "entropy", "correct", "logit_gradients", TopK(3))
    mine, theirs = (build(with_worker(spec, **worker)).forward(batch, needs) for worker in ({}, OFF))
    for name, column in theirs.columns().items():
        torch.testing.assert_close(mine.columns()[name], column, rtol=0, atol=1e-5)


def test_a_teachers_tokens_are_scored_beside_shared_ones(model_of):
    def taught():
        batch = answers()
        beside = torch.stack(
            [(batch.token_ids + 1) % 90, (batch.token_ids * 3 + torch.arange(len(batch.token_ids))) % 80 + 2]
        )
        return batch.with_columns(teacher_ids=beside.T.contiguous())

    needs = ("logprobs", "student_logprobs")
    spec = make_spec(model_of("llama"))

    def compute(outputs, batch, sizes):
        terms = (outputs.logprobs + outputs.student_logprobs.sum(-1)) * batch.advantages * batch.loss_mask
        return LossTerms(terms.sum() / sizes.tokens)

    found = []
    for worker in ({}, OFF):
        strategy, gradients = build(with_worker(spec, **worker)), {}
        before = strategy.forward(taught(), needs)
        strategy._apply = lambda lr, s=strategy, g=gradients: (
            g.update((n, p.grad.clone()) for n, p in s._model.named_parameters()) or (0.0, True)
        )
        strategy.train_step(taught(), LossFn(compute=compute, needs=needs))
        found.append((before, gradients))
    torch.testing.assert_close(found[0][0].student_logprobs, found[1][0].student_logprobs, rtol=0, atol=1e-5)
    assert max(relative(found[0][1][name], gradient) for name, gradient in found[1][1].items()) < 1e-5


def test_a_reward_model_that_learns_reads_the_prompt_of_a_pair_once(model_of):
    spec = make_spec(model_of("llama"), kind="reward")
    found, expected = (played(with_worker(spec, **worker), pairs, ("values",)) for worker in ({}, OFF))
    same(found, expected)
    assert tokens(found[3]) < tokens(expected[3])


def ranks_played(info, spec, make):
    before, loss, gradients, shapes = played(spec, make, info=info)
    return before, loss, gradients, tokens(shapes)


@pytest.mark.parametrize("layout", ["fsdp2", "ulysses", "zero2", "zero3"])
def test_two_ranks_give_the_gradients_of_one(ranks, model_of, layout):
    path = model_of("qwen2")
    expected = played(make_spec(path, worker=OFF), answers)
    if layout.startswith("zero"):
        pytest.importorskip("deepspeed")
        spec = layout_spec(path, "deepspeed_train", {"zero_optimization": {"stage": int(layout[-1])}})
        steps = [ranks.run(stepped, 2, with_worker(spec, **worker)) for worker in ({}, OFF)]
        for name, weight in steps[1][0].items():
            assert relative(steps[0][0][name], weight) < 1e-4, name
        return
    model = {"ulysses_size": 2} if layout == "ulysses" else {}
    found = ranks.run(ranks_played, 2, make_spec(path, model=model), answers)
    plain = ranks.run(ranks_played, 2, make_spec(path, model=model, worker=OFF), answers)
    assert sum(f[3] for f in found) < 0.8 * sum(p[3] for p in plain)
    losses = [f[1] for f in found]
    assert (losses[0] if layout == "ulysses" else sum(losses)) == pytest.approx(expected[1], abs=1e-5)
    for name, gradient in expected[2].items():
        assert relative(found[0][2][name], gradient) < 1e-5, name


def stepped(info, spec):
    strategy, batch = build(spec, info), answers()
    place = strategy.layout
    for _ in range(2):
        strategy.train_step(batch.select(list(range(place.dp_rank, len(batch), place.dp_size))), LOSS)
    return {name: tensor.detach().clone() for name, tensor in strategy.named_weights()}


def test_rows_that_share_tokens_and_score_none_are_computed(model_of):
    rows = [[*range(10, 20), 30], [*range(10, 20), 31], [50, 51, 52, 53]]
    batch = batch_of(rows, [[False] * 11, [False] * 11, [False, True, True, True]])
    alone = {"per_device_train_batch_size": 1}
    spec = make_spec(model_of("llama"), training=alone)
    same(played(spec, lambda: batch), played(with_worker(spec, **OFF), lambda: batch))


# --- what is computed ------------------------------------------------------------------------------------------------


def test_a_step_computes_the_tokens_of_the_tree(model_of):
    strategy, batch = build(make_spec(model_of("llama"))), answers()
    metrics = []
    shapes = sizes_of_passes(strategy, lambda: metrics.append(strategy.train_step(batch, LOSS).result()))
    # Two rows of 16 tokens are allowed. The first group takes 9 + 3 + 2 + 3, the second 12 + 1 + 3 + 2 + 4, the rest 3.
    assert batch.num_tokens == 48 + 58 + 3
    assert shapes == [(1, 22 + 3), (1, 17)]
    assert metrics[0]["actor/shared_tokens"] == 109 - 42


def test_rows_that_share_nothing_are_computed_as_ever_to_the_last_bit(model_of):
    batch, found = make_batch(), []
    for worker in ({}, OFF):
        strategy = build(make_spec(model_of("llama"), worker=worker))
        outputs = strategy.forward(batch, ("logprobs",)).logprobs
        shapes = sizes_of_passes(strategy, lambda s=strategy: s.train_step(batch, LOSS))
        found.append((outputs, shapes, strategy.forward(batch, ("logprobs",)).logprobs))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert torch.equal(found[0][2], found[1][2])


def test_a_token_budget_counts_what_is_computed(model_of):
    budget = {"use_dynamic_batching_in_train": True, "max_tokens_per_microbatch_in_train": 24}
    shapes = {}
    for worker in (ON, OFF):
        strategy = build(make_spec(model_of("llama"), worker={**budget, **PACKED, **worker}))
        passes = sizes_of_passes(strategy, lambda s=strategy: s.train_step(answers(), LOSS))
        shapes[worker["use_prefix_sharing"]] = [width for _, width in passes]
    assert max(shapes[True]) <= 24
    assert (len(shapes[True]), len(shapes[False])) == (2, 6)


# --- where it can't be -----------------------------------------------------------------------------------------------


def test_a_model_that_cannot_goes_on_without_and_says_why(tmp_path, caplog, model_of):
    path = build_tiny_model(tmp_path, "gemma2", sliding_window=4)
    with caplog.at_level(logging.INFO, logger="roll.strategies.training.micro"):
        strategy = build(make_spec(path))
    assert not strategy._micros.shares_prefixes
    assert "softcap=50.0" in caplog.text or "eager attention instead of sdpa" in caplog.text
    plain = build(make_spec(path, worker=OFF))
    assert torch.equal(*(s.forward(answers(), ("logprobs",)).logprobs for s in (strategy, plain)))
    with pytest.raises(ValueError, match=r"actor_train.use_prefix_sharing: .*Remove it"):
        build(make_spec(path, worker=ON))


@pytest.mark.parametrize("window", [3, 100])
def test_a_call_without_a_mask_keeps_a_window_that_slides(tmp_path, window):
    from transformers import AutoModel

    decoder = AutoModel.from_pretrained(build_tiny_model(tmp_path, "mistral", sliding_window=window)).eval()
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        before = decoder(input_ids=ids, use_cache=False).last_hidden_state
        _share(decoder, None, packed=False, half=False)
        assert torch.allclose(decoder(input_ids=ids, use_cache=False).last_hidden_state, before, atol=1e-6)


@pytest.mark.parametrize("kind", ["mamba", "minimax"])
def test_models_that_mix_tokens_by_other_means_are_found_out(kind):
    decoder = make_model(kind, REFUSED[kind][0]).get_decoder()
    before = decoder.config._attn_implementation
    with pytest.raises(ValueError, match=r"."):
        _share(decoder, None, packed=False, half=False)
    assert decoder.config._attn_implementation == before


def test_what_rules_it_out_in_the_section_is_said(model_of):
    adapters = {"lora_rank": 4, "lora_dropout": 0.1}
    spec = make_spec(model_of("llama"), model=adapters)
    assert not build(spec)._micros.shares_prefixes
    with pytest.raises(ValueError, match="with model_args.lora_dropout a token is another in every row"):
        build(with_worker(spec, **ON))
    assert build(make_spec(model_of("llama"), model={"lora_rank": 4}))._micros.shares_prefixes


def test_an_exported_model_knows_nothing_of_it(model_of, tmp_path):
    from transformers import AutoModelForCausalLM

    strategy = build(make_spec(model_of("llama"), worker=ON))
    strategy.export(tmp_path)
    assert "roll" not in (tmp_path / "config.json").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"
    assert dataclasses.asdict(strategy._spec.worker)["use_prefix_sharing"]
