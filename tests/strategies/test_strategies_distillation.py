"""Vocabulary-wide quantities: the top tokens, and a loss between two models' distributions, on every backend."""

from __future__ import annotations

import functools

import pytest
import torch
from layout_contract import (
    CP2,
    PACKED,
    PP2,
    SP,
    STEPS,
    TP2,
    by_hand,
    differences,
    layout_spec,
    play,
    relative,
    run_layout,
)
from test_deepspeed_steps import STAGES
from train_contract import build, make_batch, make_info, make_spec

from roll.algorithms.divergences import forward_kl, jensen_shannon
from roll.strategies.base import LossFn, LossTerms, TopK
from roll.strategies.training.micro import nonfinite_rows, padding_row
from roll.types.batch import TokenOutputs
from roll.types.metrics import Metrics

K = 7
VOCAB = 106
"""Of the tiny models."""
FIRST = 1e-5
"""Allowed relative difference of what precedes the first optimizer step."""
OWN_SHARE = 0.1
"""Of the log-prob of the sampled token, which may also be among the teacher's, in the loss."""


def divergence_of(batch):
    """The contract asks for one divergence with some tokens and another with all of them."""
    return forward_kl if batch.teacher_ids.shape[1] == VOCAB else jensen_shannon


def distillation(outputs, batch, sizes):
    """The mean divergence from the teacher, and some of the negative log-likelihood."""
    found = divergence_of(batch)(outputs.student_logprobs, batch.teacher_logprobs, batch.loss_mask)
    loss = (found - OWN_SHARE * outputs.logprobs * batch.loss_mask).sum() / sizes.tokens
    metrics = Metrics()
    metrics.add_sum("loss", float(loss.detach()))
    return LossTerms(loss, metrics)


DISTILLATION = LossFn(compute=distillation, needs=("logprobs", "student_logprobs"))


def distillation_by_hand(table, batch):
    """The same from all log-probs [N, V] of the student, the outcomes joined by plain sums in float64."""
    mask = batch.loss_mask
    p, table, ids = batch.teacher_logprobs[mask].double().exp(), table[mask], batch.teacher_ids[mask]
    q = table.double().exp().gather(-1, ids)
    if p.shape[1] < VOCAB:
        p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], dim=-1) for x in (p, q))
        m = (p + q) / 2
        found = (p * (p / m).log() + q * (q / m).log()).sum(-1) / 2
    else:
        found = (p * (p.log() - q.log())).sum(-1)
    own = table.gather(-1, batch.token_ids[mask, None])[:, 0]
    return (found - OWN_SHARE * own).mean().float()


def taught_batch(ids, logprobs):
    return make_batch().with_columns(teacher_ids=ids, teacher_logprobs=logprobs)


@pytest.fixture(scope="module")
def taught(model_of):
    """`taught(k)`: the arguments of `taught_batch`, from a forward pass of another model."""

    @functools.cache
    def get(k):
        outputs = build(make_spec(model_of("llama", seed=5, initializer_range=0.4))).forward(make_batch(), (TopK(k),))
        batch = make_batch().join(outputs, teacher_ids="top_ids", teacher_logprobs="top_logprobs")
        return batch.teacher_ids, batch.teacher_logprobs

    return get


@pytest.fixture(scope="module")
def reference(model_of, taught):
    """`reference(k)`: the plain loop."""
    from transformers import AutoModelForCausalLM

    @functools.cache
    def get(k):
        model = AutoModelForCausalLM.from_pretrained(model_of("llama"), dtype=torch.float32)
        make = functools.partial(taught_batch, *taught(k))
        return by_hand(model, distillation_by_hand, make=make, tables=True)

    return get


@pytest.fixture
def check(model_of, taught, reference):
    def run(ranks, strategy, options, world, *, k=K, tolerance=1e-4, **changes):
        make = functools.partial(taught_batch, *taught(k))
        more = ("student_logprobs", "logit_gradients", TopK(k))
        part = functools.partial(play, make=make, loss=DISTILLATION, more=more)
        found = run_layout(ranks, layout_spec(model_of("llama"), strategy, options, **changes), world, play=part)
        want, batch, outputs = reference(k), make(), found.outputs
        wrong = differences(found, want)
        acting, table = batch.action_mask, want.seen
        for name, ids in (("student_logprobs", batch.teacher_ids), ("top_logprobs", outputs.top_ids)):
            column = getattr(outputs, name)
            assert (column[~acting] == 0).all()
            wrong[name] = relative(column[acting], table.gather(-1, ids)[acting])
        p = table.exp()
        chosen = torch.nn.functional.one_hot(batch.token_ids, p.shape[1])
        lengths = (p - chosen).square().sum(-1)  # of d log p(token) / d logits = onehot - p
        wrong["logit_gradients"] = relative(outputs.logit_gradients[acting], lengths[acting])
        assert (outputs.logit_gradients[~acting] == 0).all()
        assert relative(outputs.top_logprobs[acting], table.topk(k).values[acting]) <= FIRST
        # Before the steps add their roundings up: the log-probs, and the first loss and gradient.
        assert max(wrong["student_logprobs"], wrong["top_logprobs"]) <= FIRST
        assert found.losses[0] == pytest.approx(want.losses[0], rel=FIRST)
        assert found.norms[0] == pytest.approx(want.norms[0], rel=FIRST)
        assert all(len(set(row)) == k for row in outputs.top_ids[acting].tolist())
        wrong = {name: value for name, value in wrong.items() if not value <= tolerance}
        assert len(found.losses) == STEPS
        assert found.losses[-1] < found.losses[0]
        assert not wrong, f"{strategy} {options} on {world} rank(s): relative differences {wrong}, allowed {tolerance}"

    return run


class Here:
    """One rank, in this process."""

    @staticmethod
    def run(function, world, *args):
        assert world == 1
        return [function(make_info(), *args)]


@pytest.mark.parametrize("k", [K, VOCAB])
def test_one_rank_in_this_process(check, k):
    check(Here, "fsdp2_train", {}, 1, k=k)


FSDP = {
    "sharded over two": (2, {}),
    "packed": (1, PACKED),
    "sequences shared by two": (2, {"model": {"ulysses_size": 2}}),
}


@pytest.mark.parametrize("layout", FSDP)
def test_fsdp2(ranks, check, layout):
    world, changes = FSDP[layout]
    check(ranks, "fsdp2_train", {}, world, **changes)


@pytest.mark.parametrize(("stage", "world", "changes"), [("stage 1", 1, {}), ("stage 3", 2, PACKED)])
def test_deepspeed(ranks, check, stage, world, changes):
    check(ranks, "deepspeed_train", {"zero_optimization": STAGES[stage]}, world, **changes)


MEGATRON = {
    "one rank": (1, {}, {}),
    "data 2, packed": (2, {}, PACKED),
    "tensor 2, sequence, packed": (2, {**TP2, **SP}, PACKED),
    "pipeline 2": (2, PP2, {}),
    "context 2, packed": (2, CP2, PACKED),
    "tensor 2 x context 2, sequence": (4, {**TP2, **CP2, **SP}, {}),
}


@pytest.mark.parametrize("layout", MEGATRON)
def test_megatron(ranks, check, layout):
    world, options, changes = MEGATRON[layout]
    check(ranks, "megatron_train", options, world, **changes)


def test_a_whole_vocabulary_over_two_ranks(ranks, check):
    check(ranks, "megatron_train", TP2, 2, k=VOCAB)


def test_padding_rows_and_rows_without_finite_numbers():
    batch = taught_batch(torch.ones(make_batch().num_tokens, 2, dtype=torch.int64), None)
    assert padding_row(batch).teacher_ids.tolist() == [[0, 0], [0, 0]]
    column = torch.zeros(batch.num_tokens, 2)
    column[batch.offsets[1] - 1, 1] = -torch.inf
    outputs = TokenOutputs(row_ids=batch.row_ids, offsets=batch.offsets, student_logprobs=column)
    assert nonfinite_rows(outputs, batch) == {"row0"}


def test_requests_that_cannot_be_met(model_of):
    strategy = build(make_spec(model_of("llama")))
    with pytest.raises(ValueError, match=r"TopK\(107\) asks for more tokens than the vocabulary's 106"):
        strategy.forward(make_batch(), (TopK(VOCAB + 1),))
    with pytest.raises(ValueError, match="TopK asks for 0 tokens"):
        TopK(0)
    with pytest.raises(ValueError, match="column 'teacher_ids' is not filled"):
        strategy.train_step(make_batch(), DISTILLATION)
    empty = strategy.forward(make_batch().select([]), ("logprobs", TopK(3)))
    assert empty.top_ids.shape == empty.top_logprobs.shape == (0, 3)
