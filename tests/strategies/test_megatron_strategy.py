"""Megatron behind the strategy interface: who collects, bad gradients, frozen weights, critics, sleep, errors."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from layout_contract import CP2, EP2, OVERLAP, PLAIN, PP2, SP, TP2, VP2, layout_spec, my_rows, play, relative
from train_contract import LOSS, VALUE_LOSS, build, make_batch, make_spec, token_mean_loss, weights_of

from roll.distributed.dispatch import check_layouts
from roll.strategies.base import LossFn, LossTerms
from roll.strategies.training.micro import lay_out, take_shard, widen


def a_spec(path, options, **changes):
    return layout_spec(path, "megatron_train", options, **changes)


def on_ranks(info, spec, scenario):
    """`scenario(strategy, info)` on one rank."""
    return scenario(build(spec, info), info)


# --- layout of ranks -----------------------------------------------------------------------------------------------


def place(strategy, info):
    metrics = strategy.train_step(my_rows(strategy), LOSS).result()
    return strategy.layout, metrics


@pytest.mark.parametrize("options", [{**TP2, **PP2}, {**CP2, **PP2}, TP2, VP2])
def test_one_rank_per_data_rank_collects_and_rank_0_tells_the_norm(ranks, model_of, options):
    answers = ranks.run(on_ranks, 4, a_spec(model_of("llama", layers=4), options), place)
    layouts = [layout for layout, _ in answers]
    check_layouts("actor_train", layouts)
    assert layouts[0].collects
    told = [metrics for layout, metrics in answers if layout.collects]
    assert ["actor/grad_norm" in metrics for metrics in told] == [True] + [False] * (len(told) - 1)
    assert all("loss" in metrics for metrics in told)


def two_roles(info, spec):
    first, second = build(spec, info), build(dataclasses.replace(spec, kind="value"), info)
    metrics = first.train_step(my_rows(first), LOSS).result()
    values = second.forward(my_rows(second), ("values",)).values
    return metrics["actor/grad_norm"], values.abs().max()


def test_roles_of_one_process_share_its_groups(ranks, model_of):
    alone = ranks.once(on_ranks, 1, a_spec(model_of("llama"), {}), place)[0][1]
    norm, largest = ranks.run(two_roles, 1, a_spec(model_of("llama"), {}))[0]
    assert norm == alone["actor/grad_norm"]
    assert largest == 0.0


# --- what a rank feeds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("parts", "multiple"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 2)])
def test_shards_hold_every_token_and_every_score_once(packed, parts, multiple):
    layout = lay_out(make_batch(), torch.device("cpu"), packed=packed)
    whole = widen(layout, parts * multiple)
    shards, places = zip(*(take_shard(whole, rank, parts) for rank in range(parts)), strict=True)
    assert len({shard.ids.shape for shard in shards}) == 1
    assert shards[0].ids.shape[1] % multiple == 0
    ids = torch.cat([shard.ids for shard in shards], dim=1)
    assert torch.equal(ids[:, : layout.ids.shape[1]], layout.ids)
    assert torch.equal(torch.cat([shard.positions for shard in shards], dim=1), whole.positions)
    assert torch.equal(torch.cat(places).sort().values, torch.arange(len(layout.targets)))
    starts = [*(whole.positions.flatten() == 0).nonzero()[:, 0].tolist(), whole.positions.numel()]
    assert [sum(whole.spans[:i]) for i in range(len(whole.spans) + 1)] == starts
    assert all(shard.spans == whole.spans for shard in shards)
    flat = layout.ids.flatten()[layout.index]
    for shard, place in zip(shards, places, strict=True):
        assert torch.equal(shard.ids.flatten()[shard.index], flat[place])
        assert torch.equal(shard.targets, layout.targets[place])


# --- optimizer -----------------------------------------------------------------------------------------------------


def spoiled(strategy, info):
    before = weights_of(strategy)
    bad = LossFn(compute=broken, needs=("logprobs",))
    skipped = strategy.train_step(my_rows(strategy), bad).result()
    same = all(torch.equal(before[name], tensor) for name, tensor in weights_of(strategy).items())
    good = strategy.train_step(my_rows(strategy), LOSS).result()
    return same, skipped, good


def broken(outputs, batch, sizes):
    terms = token_mean_loss(outputs, batch, sizes)
    return LossTerms(terms.loss * float("nan"), terms.metrics)


@pytest.mark.parametrize(("world", "options"), [(1, {}), (2, TP2), (2, PP2), (2, OVERLAP)])
def test_a_gradient_that_is_no_number_is_skipped_and_counted(ranks, model_of, world, options):
    spec = a_spec(model_of("llama"), options)
    fresh = ranks.once(on_ranks, world, spec, place)[0][1]
    same, skipped, good = ranks.run(on_ranks, world, spec, spoiled)[0]
    assert same
    assert skipped["actor/skipped_steps"] == 1.0 and "actor/grad_norm" not in skipped
    assert good["actor/skipped_steps"] == 0.0
    assert good["actor/grad_norm"] == fresh["actor/grad_norm"]


def only_some(batch):
    return torch.tensor([name != "row1" for name in batch.row_ids])


def skip_rows(strategy, info):
    batch = my_rows(strategy)
    advantages = batch.advantages.clone()
    if "row1" in batch.row_ids:
        start, end = batch.offsets[batch.row_ids.index("row1") :][:2].tolist()
        advantages[start:end] = 0.0
    batch = dataclasses.replace(batch, advantages=advantages)
    norms = []
    for loss in (LOSS, LossFn(compute=token_mean_loss, needs=("logprobs",), has_gradient=only_some)):
        norms.append(build_like(strategy, info).train_step(batch, loss).result().get("actor/grad_norm"))
    return norms


def build_like(strategy, info):
    return build(strategy._spec, info)


@pytest.mark.parametrize(("world", "options"), [(1, {}), (2, {}), (2, PP2)])
def test_rows_without_a_gradient_are_not_computed_but_count(ranks, model_of, world, options):
    everything, some = ranks.run(on_ranks, world, a_spec(model_of("llama"), options), skip_rows)[0]
    assert some == pytest.approx(everything, rel=1e-6)


def three_steps(strategy, info):
    history = [strategy.train_step(my_rows(strategy), LOSS).result() for _ in range(3)]
    return history, weights_of(strategy)


@pytest.mark.parametrize("changes", [{"l2": 0.5}, {"max_grad_norm": 0.0}])
@pytest.mark.parametrize(("world", "options"), [(1, {}), (2, {}), (2, {**TP2, **PLAIN}), (2, PP2)])
def test_anchor_and_clipping_do_what_they_do_on_fsdp2(ranks, model_of, world, options, changes):
    path = model_of("llama")
    training = {"warmup_steps": 2, "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}
    training["end_weight_decay"] = 5.0
    mine = dataclasses.replace(a_spec(path, options, training=training), **changes)
    plain = layout_spec(path, "fsdp2_train", {}, training=training)
    theirs, expected = ranks.once(on_ranks, 1, dataclasses.replace(plain, **changes), three_steps)[0]
    history, weights = ranks.run(on_ranks, world, mine, three_steps)[0]
    for a, b in zip(history, theirs, strict=True):
        assert a["actor/grad_norm"] == pytest.approx(b["actor/grad_norm"], rel=1e-4)
        assert a["actor/lr"] == b["actor/lr"]
    assert max(relative(weights[name], expected[name]) for name in expected) < 1e-4


FROZEN = {
    "embedding": ("model.embed_tokens",),
    "a layer": ("model.layers.0.",),
    "a whole stage": ("model.embed_tokens", "model.layers.0."),
    "norms": ("model.layers.0.input_layernorm", "model.layers.1.post_attention_layernorm", "model.norm"),
}


@pytest.mark.parametrize("what", FROZEN)
@pytest.mark.parametrize(("world", "options"), [(1, {}), (2, TP2), (2, PP2), (2, OVERLAP)])
def test_frozen_prefixes_stay_and_the_rest_trains_as_on_fsdp2(ranks, model_of, world, options, what):
    path, model = model_of("llama", tie_word_embeddings=False), {"freeze_module_prefix": FROZEN[what]}
    theirs, expected = ranks.once(on_ranks, 1, layout_spec(path, "fsdp2_train", {}, model=model), three_steps)[0]
    history, weights = ranks.run(on_ranks, world, a_spec(path, options, model=model), three_steps)[0]
    for a, b in zip(history, theirs, strict=True):
        assert a["actor/grad_norm"] == pytest.approx(b["actor/grad_norm"], rel=1e-4)
    assert max(relative(weights[name], expected[name]) for name in expected) < 1e-4


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_layers_after_a_frozen_embedding_are_recomputed_with_their_gradients(ranks, model_of, recompute):
    path, model = model_of("llama", tie_word_embeddings=False), {"freeze_module_prefix": FROZEN["embedding"]}
    plain = dict(model, disable_gradient_checkpointing=True)
    expected = ranks.once(on_ranks, 1, a_spec(path, {}, model=plain), three_steps)[0][0]
    options = {"recompute_granularity": recompute}
    history = ranks.run(on_ranks, 1, a_spec(path, options, model=model), three_steps)[0][0]
    assert [m["actor/grad_norm"] for m in history] == pytest.approx([m["actor/grad_norm"] for m in expected], rel=1e-5)


def refusals(info, specs):
    """What a rank says of each role; a process may be asked for one after the other."""
    messages = []
    for spec in specs:
        with pytest.raises(ValueError, match=".") as refused:
            build(spec, info)
        messages.append(str(refused.value))
    return messages


def test_what_cannot_be_frozen_is_refused(ranks, model_of):
    path = model_of("llama", tie_word_embeddings=False)
    cases = {
        "one parameter": ("model.layers.0.self_attn.q_proj",),
        "no parameter begins": ("no.such",),
        "nothing to train": ("model.", "lm_head"),
    }
    specs = [a_spec(path, PP2, model={"freeze_module_prefix": prefixes}) for prefixes in cases.values()]
    for messages in ranks.run(refusals, 2, specs):
        for words, message in zip(cases, messages, strict=True):
            assert words in message


# --- other kinds ---------------------------------------------------------------------------------------------------


def critic(strategy, info):
    batch = my_rows(strategy)
    norms = [strategy.train_step(batch, VALUE_LOSS).result().get("critic/grad_norm") for _ in range(3)]
    values = strategy.forward(batch, ("values",)).values
    return norms, values if strategy.layout.collects else None, weights_of(strategy)


@pytest.mark.parametrize(("world", "options"), [(1, {}), (2, {}), (2, {**TP2, **SP}), (2, PP2), (2, CP2), (2, TP2)])
def test_a_critic_learns_as_on_fsdp2(ranks, model_of, world, options):
    path = model_of("llama")
    norms, values, weights = ranks.once(on_ranks, 1, layout_spec(path, "fsdp2_train", {}, kind="value"), critic)[0]
    answers = ranks.run(on_ranks, world, a_spec(path, options, kind="value"), critic)
    assert answers[0][0] == pytest.approx(norms, rel=1e-4)
    mine = torch.cat([values for _, values, _ in answers if values is not None])
    assert relative(mine, values) < 1e-4
    assert answers[0][2].keys() == weights.keys()


@pytest.mark.parametrize(("world", "options"), [(1, {}), (2, TP2), (2, PP2), (2, OVERLAP)])
def test_bfloat16_stays_close_to_float32(ranks, model_of, world, options):
    runs = []
    for dtype in ("fp32", "bf16"):
        spec = a_spec(model_of("llama"), options, model={"dtype": dtype})
        runs.append(ranks.run(play, world, spec)[0])
    full, half = runs
    assert half["norms"] == pytest.approx(full["norms"], rel=0.05)
    assert {tensor.dtype for tensor in half["weights"].values()} == {torch.bfloat16}
    worst = max(relative(half["weights"][name].float(), tensor) for name, tensor in full["weights"].items())
    assert 0.0 < worst < 0.2


def score(strategy, info):
    return strategy.forward(my_rows(strategy), ("logprobs", "entropy"))


def test_infer_scores_without_optimizer(ranks, model_of):
    spec = layout_spec(model_of("llama"), "megatron_infer", {**TP2, **PP2})
    spec = dataclasses.replace(spec, trains=False, temperature=0.7)
    trained = dataclasses.replace(a_spec(model_of("llama"), {}), temperature=0.7)
    mine, theirs = ranks.run(on_ranks, 4, spec, score), ranks.run(on_ranks, 1, trained, score)[0]
    assert mine[0].row_ids == theirs.row_ids
    torch.testing.assert_close(mine[0].logprobs, theirs.logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine[0].entropy, theirs.entropy, rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match="without an optimizer"):
        ranks.run(on_ranks, 4, spec, place)


# --- balancing loss ------------------------------------------------------------------------------------------------


def zero_loss(outputs, batch, sizes):
    return LossTerms(outputs.logprobs.sum() * 0.0)


def balance(strategy, info):
    loss = LossFn(compute=zero_loss, needs=("logprobs",))
    return strategy.train_step(my_rows(strategy), loss).result().get("actor/grad_norm")


def test_the_balancing_loss_is_weighted_alike_in_every_layout(ranks, model_of):
    # Packed into one line the micro-batch is the same everywhere; with two data ranks its rows differ.
    worker = {
        "use_sequence_packing": True,
        "use_dynamic_batching_in_train": True,
        "max_tokens_per_microbatch_in_train": 1000,
    }
    norms = []
    for world, options in [(1, {}), (2, PP2), (2, {**TP2, **SP}), (2, CP2)]:
        spec = a_spec(model_of("qwen3_moe"), {**options, "moe_aux_loss_coeff": 0.5}, worker=worker)
        norms.append(ranks.run(on_ranks, world, spec, balance)[0])
    assert norms[0] > 0.0
    assert norms[1:] == pytest.approx([norms[0]] * 3, rel=1e-3)
    off = a_spec(model_of("qwen3_moe"), {}, worker=worker)
    assert ranks.run(on_ranks, 1, off, balance)[0] == 0.0


# --- sleep ---------------------------------------------------------------------------------------------------------


def nap(strategy, info):
    first = strategy.train_step(my_rows(strategy), LOSS).result()
    freed = strategy.sleep()
    again = strategy.sleep()
    scored = strategy.forward(my_rows(strategy), ("logprobs",)).logprobs
    strategy.wake()
    second = strategy.train_step(my_rows(strategy), LOSS).result()
    return freed, again, scored, [first, second], weights_of(strategy)


def no_nap(strategy, info):
    history = [strategy.train_step(my_rows(strategy), LOSS).result() for _ in range(2)]
    return history, weights_of(strategy)


@pytest.mark.parametrize(("world", "options"), [(1, {}), (2, OVERLAP), (2, EP2), (1, PLAIN)])
def test_training_goes_on_after_a_nap_as_if_nothing_had_been(ranks, model_of, world, options):
    spec = a_spec(model_of("qwen3_moe"), options)
    freed, again, _, history, weights = ranks.run(on_ranks, world, spec, nap)[0]
    expected, awake = ranks.run(on_ranks, world, spec, no_nap)[0]
    parameters = sum(tensor.numel() for tensor in weights.values())
    assert freed >= 4 * parameters / world
    assert again == 0
    assert history == expected
    assert all(torch.equal(weights[name], tensor) for name, tensor in awake.items())


# --- export --------------------------------------------------------------------------------------------------------


def exported(folder, strategy, info):
    strategy.train_step(my_rows(strategy), LOSS)
    strategy.export(folder)
    outputs = strategy.forward(my_rows(strategy), ("logprobs",))
    return outputs.logprobs


@pytest.mark.parametrize(("family", "options"), [("llama", {**TP2, **PP2}), ("qwen3_moe", {**EP2, **PP2})])
def test_an_exported_folder_is_a_transformers_model(ranks, model_of, tmp_path, family, options):
    spec = a_spec(model_of(family), options)
    theirs = ranks.run(on_ranks, 4, spec, functools.partial(exported, tmp_path / "out"))[0]
    strategy = build(make_spec(tmp_path / "out"))
    mine = strategy.forward(make_batch().select(range(len(make_batch()))), ("logprobs",)).logprobs
    torch.testing.assert_close(mine[: len(theirs)], theirs, rtol=1e-4, atol=1e-5)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
