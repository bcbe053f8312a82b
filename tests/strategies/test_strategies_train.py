"""The training contract on one rank and on two: right log-probs, and a loss that no layout can change."""

from __future__ import annotations

import pytest
import torch
from train_contract import LOSS, build, make_batch, make_spec, token_mean_loss, trained, weights_of, with_worker

from roll.configs.schema.strategy_config import Fsdp2Config, StrategyArgs
from roll.strategies.base import LossFn, LossTerms
from roll.strategies.training.micro import denominators, plan_micro_batches
from roll.types.batch import TokenBatch


def hf_model(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def hf_logprobs(model, batch: TokenBatch, temperature: float):
    """Row by row, unpadded: log-prob and entropy at every action token, 0 elsewhere."""
    logprobs, entropies = [], []
    for i in range(len(batch)):
        ids, acting = batch.row("token_ids", i), batch.row("action_mask", i)
        table = (model(ids[None]).logits[0].float() / temperature).log_softmax(-1)[:-1]
        picked = table.gather(-1, ids[1:, None])[:, 0]
        entropy = -(table.exp() * table).sum(-1)
        zero = torch.zeros(1)
        logprobs.append(torch.cat([zero, picked]) * acting)
        entropies.append(torch.cat([zero, entropy]) * acting)
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_forward_equals_transformers_row_by_row(tiny_family, temperature):
    batch = make_batch()
    outputs = build(make_spec(tiny_family, temperature=temperature)).forward(batch, ("logprobs", "entropy"))
    with torch.no_grad():
        logprobs, entropies = hf_logprobs(hf_model(tiny_family), batch, temperature)
    assert outputs.row_ids == batch.row_ids
    torch.testing.assert_close(outputs.logprobs, logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(outputs.entropy, entropies, atol=1e-5, rtol=0)


def test_train_steps_equal_a_plain_transformers_and_adamw_loop(tiny_family):
    batch, model = make_batch(), hf_model(tiny_family)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=1e-2
    )
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        logprobs, _ = hf_logprobs(model, batch, 1.0)
        (-(logprobs * batch.advantages).sum() / batch.loss_mask.sum()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    history, weights = trained(make_spec(tiny_family, training={"weight_decay": 0.1}, max_grad_norm=1.0), batch)
    assert [m.result()["actor/grad_norm"] for m in history] == pytest.approx(norms, rel=1e-4)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), atol=1e-4, rtol=1e-4)


LAYOUTS = {
    "one row at a time": {"training": {"per_device_train_batch_size": 1}},
    "all rows at once": {"training": {"per_device_train_batch_size": 6}},
    "token budget": {"worker": {"use_dynamic_batching_in_train": True, "max_tokens_per_microbatch_in_train": 24}},
    "no recomputation": {"model": {"disable_gradient_checkpointing": True}},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_gradient_and_weights_do_not_depend_on_micro_batches(tiny_model, layout):
    batch = make_batch()
    expected, expected_weights = trained(make_spec(tiny_model), batch)
    history, weights = trained(make_spec(tiny_model, **LAYOUTS[layout]), batch)
    for mine, theirs in zip(history, expected, strict=True):
        assert mine.result()["loss"] == pytest.approx(theirs.result()["loss"], abs=1e-5)
        assert mine.result()["actor/grad_norm"] == pytest.approx(theirs.result()["actor/grad_norm"], rel=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected_weights[name], atol=2e-5, rtol=1e-4)


def test_a_shuffled_batch_trains_like_the_unshuffled_one(tiny_model):
    batch = make_batch()
    order = [3, 0, 5, 1, 4, 2]
    (first, *_), _ = trained(make_spec(tiny_model), batch, steps=1)
    (second, *_), _ = trained(make_spec(tiny_model), batch.select(order), steps=1)
    assert first.result()["loss"] == pytest.approx(second.result()["loss"], abs=1e-6)
    assert first.result()["actor/grad_norm"] == pytest.approx(second.result()["actor/grad_norm"], rel=1e-5)


def test_rows_of_weight_zero_leave_numerator_and_denominator(tiny_model):
    batch = make_batch()
    weighted = batch.with_columns(loss_weight=torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0]))
    (with_zeros, *_), weights = trained(make_spec(tiny_model), weighted, steps=1)
    (without, *_), expected = trained(make_spec(tiny_model), batch.select([0, 1, 3, 4]), steps=1)
    assert with_zeros.result()["loss"] == pytest.approx(without.result()["loss"], abs=1e-6)
    assert with_zeros.result()["actor/grad_norm"] == pytest.approx(without.result()["actor/grad_norm"], rel=1e-5)
    assert denominators(weighted) == denominators(batch.select([0, 1, 3, 4]))
    assert weights.keys() == expected.keys()


def test_a_checkpoint_continues_bit_for_bit(tiny_model, tmp_path):
    batch, spec = make_batch(), make_spec(tiny_model, training={"lr_scheduler_type": "cosine", "warmup_steps": 2})
    strategy = build(spec)
    for _ in range(2):
        strategy.train_step(batch, LOSS)
    strategy.save(tmp_path / "checkpoint")
    expected = [strategy.train_step(batch, LOSS).result() for _ in range(3)]
    resumed = build(spec)
    resumed.load(tmp_path / "checkpoint")
    assert [resumed.train_step(batch, LOSS).result() for _ in range(3)] == expected
    for name, tensor in weights_of(resumed).items():
        assert torch.equal(tensor, weights_of(strategy)[name])


def test_an_export_loads_in_transformers_with_the_trained_weights(tiny_family, tmp_path):
    from transformers import AutoTokenizer

    strategy = build(make_spec(tiny_family))
    strategy.train_step(make_batch(), LOSS)
    strategy.export(tmp_path / "hf")
    loaded = dict(hf_model(tmp_path / "hf").named_parameters())
    for name, tensor in strategy.named_weights():
        assert torch.equal(loaded[name], tensor)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").chat_template


def test_frozen_prefixes_stay_and_the_rest_moves(tiny_model):
    spec = make_spec(tiny_model, model={"freeze_module_prefix": ("model.layers.0.", "model.embed_tokens")})
    before = weights_of(build(spec))
    _, after = trained(spec, make_batch(), steps=1)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert not any(name.startswith(("model.layers.0.", "model.embed_tokens")) for name in moved)


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ("layers.0", "no parameter begins with 'layers.0'; the first is 'model.embed_tokens.weight'"),
        ("model", "actor_train: freeze_module_prefix leaves nothing to train"),
    ],
)
def test_prefixes_that_freeze_nothing_or_everything_are_refused(tiny_model, prefix, message):
    with pytest.raises(ValueError, match=message):
        build(make_spec(tiny_model, model={"freeze_module_prefix": (prefix,)}))


def test_l2_pulls_towards_the_starting_weights(tiny_model):
    def distance(l2):
        spec = make_spec(tiny_model, l2=l2, max_grad_norm=0.0)
        before = weights_of(build(spec))
        _, after = trained(spec, make_batch(), steps=6)
        return sum(float((after[n] - before[n]).square().sum()) for n in before)

    assert distance(1.0) < 0.8 * distance(0.0)


def test_a_gradient_that_is_not_finite_skips_the_step_and_is_counted(tiny_model):
    def broken(outputs, batch, sizes):
        return LossTerms(outputs.logprobs.sum() * float("nan"))

    strategy = build(make_spec(tiny_model))
    before = weights_of(strategy)
    result = strategy.train_step(make_batch(), LossFn(compute=broken, needs=("logprobs",))).result()
    assert (result["actor/skipped_steps"], result["actor/optimizer_steps"]) == (1, 0)
    assert all(torch.equal(before[name], tensor) for name, tensor in strategy.named_weights())
    for _ in range(3):
        strategy.train_step(make_batch(), LossFn(compute=broken, needs=("logprobs",)))
    with pytest.raises(FloatingPointError, match="5 optimizer steps in a row"):
        strategy.train_step(make_batch(), LossFn(compute=broken, needs=("logprobs",)))


def test_bf16_computes_close_to_fp32_and_keeps_fp32_weights(tiny_model):
    batch = make_batch()
    fp32 = build(make_spec(tiny_model)).forward(batch, ("logprobs",)).logprobs
    strategy = build(make_spec(tiny_model, model={"dtype": "bf16"}))
    bf16 = strategy.forward(batch, ("logprobs",)).logprobs
    assert 0 < (fp32 - bf16).abs().max() < 0.1
    assert {t.dtype for _, t in strategy.named_weights()} == {torch.float32}
    strategy.train_step(batch, LOSS)


def test_a_critic_starts_at_zero_and_learns_its_target(tiny_model):
    def squared(outputs, batch, sizes):
        return LossTerms(((outputs.values - 1.0).square() * batch.loss_mask).sum() / sizes.tokens)

    strategy, batch = build(make_spec(tiny_model, kind="value")), make_batch()
    assert not strategy.forward(batch, ("values",)).values.any()
    for _ in range(30):
        strategy.train_step(batch, LossFn(compute=squared, needs=("values",)))
    values = strategy.forward(batch, ("values",)).values[batch.action_mask]
    assert (values - 1).abs().mean() < 0.2


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        # rows sorted by length: 4 (20), 1 (12), 3 (9), 0 (7), 2 (5), 5 (3)
        ({"max_rows": 4, "max_tokens": None}, [[4, 1, 3, 0], [2, 5]]),
        ({"max_rows": None, "max_tokens": 24}, [[4], [1, 3], [0, 2, 5]]),
        ({"max_rows": None, "max_tokens": 4}, [[4], [1], [3], [0], [2], [5]]),
    ],
)
def test_micro_batches_keep_within_rows_and_padded_tokens(limits, expected):
    assert plan_micro_batches([7, 12, 5, 9, 20, 3], [[i] for i in range(6)], **limits) == expected


def two_ranks(info, spec, folder):
    # Uneven on purpose: one rank makes three passes, the other one.
    shard = [[0, 1, 2, 3, 4], [5]][info.rank]
    batch = make_batch()
    strategy = build(spec, info)
    outputs = strategy.forward(batch.select(shard), ("logprobs",))
    history = [strategy.train_step(batch.select(shard), LOSS).result() for _ in range(3)]
    weights = weights_of(strategy)
    strategy.save(folder)
    return outputs.logprobs, history, weights


@pytest.mark.parametrize("layout", [{}, {"fsdp_size": 1, "reshard_after_forward": False}])
def test_two_ranks_with_uneven_shards_equal_one(ranks, tiny_model, tmp_path, layout):
    args = StrategyArgs(strategy_name="fsdp2_train", strategy_config=Fsdp2Config(**layout))
    spec = with_worker(make_spec(tiny_model, max_grad_norm=1.0), strategy_args=args)
    answers = ranks.run(two_ranks, 2, spec, tmp_path / "checkpoint")
    (logprobs, first, two), (more_logprobs, second, _) = answers
    batch = make_batch()
    expected = build(make_spec(tiny_model)).forward(batch, ("logprobs",)).logprobs
    torch.testing.assert_close(torch.cat([logprobs, more_logprobs]), expected, atol=1e-5, rtol=0)
    history, weights = trained(make_spec(tiny_model, max_grad_norm=1.0), batch)
    for step, single in enumerate(history):
        assert first[step]["loss"] + second[step]["loss"] == pytest.approx(single.result()["loss"], abs=1e-5)
        assert first[step]["actor/grad_norm"] == pytest.approx(single.result()["actor/grad_norm"], rel=1e-4)
    for name, tensor in two.items():
        torch.testing.assert_close(tensor, weights[name], atol=1e-4, rtol=1e-4)
    # What two ranks wrote, one rank reads.
    alone = build(make_spec(tiny_model))
    alone.load(tmp_path / "checkpoint")
    for name, tensor in weights_of(alone).items():
        assert torch.equal(tensor, two[name])


def test_rows_without_gradient_are_not_computed_and_change_nothing(tiny_model):
    batch = make_batch()
    advantages = batch.advantages.clone()
    for row in (1, 4):
        advantages[batch.offsets[row] : batch.offsets[row + 1]] = 0.0
    batch = batch.with_columns(advantages=advantages)
    computed = []

    def recording(outputs, micro, sizes):
        computed.extend(micro.row_ids)
        return token_mean_loss(outputs, micro, sizes)

    skipping = LossFn(
        compute=recording,
        needs=("logprobs",),
        has_gradient=lambda b: torch.tensor([bool(b.row("advantages", i).any()) for i in range(len(b))]),
    )
    _, expected = trained(make_spec(tiny_model), batch, steps=1)
    strategy = build(make_spec(tiny_model))
    strategy.train_step(batch, skipping)
    assert sorted(computed) == ["row0", "row2", "row3", "row5"]
    for name, tensor in weights_of(strategy).items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=1e-4)
    computed.clear()
    strategy.train_step(batch.with_columns(advantages=torch.zeros_like(advantages)), skipping)
    assert computed == ["row0"]  # one row is always there to report on, and a momentum goes on
