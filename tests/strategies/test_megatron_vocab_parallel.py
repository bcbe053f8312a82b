"""Log-probs and entropy from a vocabulary that is split over ranks: those of the whole vocabulary, in float64."""

from __future__ import annotations

import pytest
import torch

from roll.strategies.megatron.vocab_parallel import vocab_parallel_outputs
from roll.strategies.training.logits import HeadRequest, logprobs_and_entropy

VOCAB, WIDTH, POSITIONS, TEMPERATURE = 37, 8, 11, 0.7


def problem(padded, dtype=torch.float64):
    """Hidden states, a head padded with rows that would win every softmax, targets, weights of the outputs."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(POSITIONS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    head = torch.randn(padded, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    head[VOCAB:] = 1e3
    targets = torch.randint(0, VOCAB, (POSITIONS,), generator=generator)
    targets[:2] = torch.tensor([0, VOCAB - 1])
    mix = torch.randn(2, POSITIONS, generator=generator, dtype=torch.float64)
    return hidden, head, targets, mix


def expected(padded, with_entropy):
    """The same by the plain way: all logits, autograd."""
    hidden, head, targets, mix = problem(padded)
    hidden.requires_grad_()
    head.requires_grad_()
    table = (hidden @ head[:VOCAB].T / TEMPERATURE).log_softmax(-1)
    logprobs, entropy = table.gather(-1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)
    loss = (logprobs * mix[0]).sum() + ((entropy * mix[1]).sum() if with_entropy else 0.0)
    loss.backward()
    return logprobs.detach(), entropy.detach(), hidden.grad, head.grad


def scored(info, padded, with_entropy, rows, dtype=torch.float64):
    """This rank's part of the computation."""
    from roll.distributed.process_group import init_process_group

    if info.world_size > 1:
        init_process_group(info, "gloo")
    hidden, head, targets, mix = problem(padded, dtype)
    part = padded // info.world_size
    weight = head[info.rank * part : (info.rank + 1) * part].clone().requires_grad_()
    hidden.requires_grad_()
    outputs = vocab_parallel_outputs(
        hidden,
        weight,
        targets,
        HeadRequest(entropy=with_entropy),
        temperature=TEMPERATURE,
        group=torch.distributed.group.WORLD if info.world_size > 1 else None,
        vocab_start=info.rank * part,
        vocab=VOCAB,
        chunk_rows=rows,
    )
    logprobs, entropy = outputs.logprobs, outputs.entropy
    assert (entropy is not None) == with_entropy
    loss = (logprobs * mix[0]).sum() + ((entropy * mix[1]).sum() if with_entropy else 0.0)
    loss.backward()
    return logprobs.detach(), None if entropy is None else entropy.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("rows", [None, 4])
@pytest.mark.parametrize(("world", "padded"), [(1, 37), (1, 64), (2, 40), (2, 80)])
def test_scores_and_gradients_of_a_split_vocabulary(ranks, world, padded, with_entropy, rows):
    # 80 rows over two ranks: the second holds padding alone.
    want = expected(padded, with_entropy)
    answers = ranks.run(scored, world, padded, with_entropy, rows)
    for logprobs, entropy, grad_hidden, _ in answers:
        torch.testing.assert_close(logprobs, want[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad_hidden, want[2], rtol=1e-10, atol=1e-12)
        if with_entropy:
            torch.testing.assert_close(entropy, want[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([a[3] for a in answers]), want[3], rtol=1e-10, atol=1e-12)


def hits(info, padded, targets):
    """What this rank says about targets being the likeliest tokens."""
    from roll.distributed.process_group import init_process_group

    if info.world_size > 1:
        init_process_group(info, "gloo")
    hidden, head, _, _ = problem(padded)
    part = padded // info.world_size
    group = torch.distributed.group.WORLD if info.world_size > 1 else None
    weight = head[info.rank * part : (info.rank + 1) * part]
    split = {"group": group, "vocab_start": info.rank * part, "vocab": VOCAB}
    request = HeadRequest(correct=True, logit_gradients=True, entropy=True)
    outputs = vocab_parallel_outputs(hidden, weight, targets, request, temperature=1.0, **split)
    return outputs.correct, outputs.logit_gradients, outputs.entropy


@pytest.mark.parametrize(("world", "padded"), [(1, 37), (1, 64), (2, 40), (2, 80)])
def test_the_likeliest_token_of_a_split_vocabulary(ranks, world, padded):
    hidden, head, _, _ = problem(padded)
    best = (hidden @ head[:VOCAB].T).argmax(-1)
    expected = torch.tensor([1.0, 0.0, 1.0] * 4)[:POSITIONS]
    targets = torch.where(expected.bool(), best, (best + 1) % VOCAB)
    p = (hidden @ head[:VOCAB].T).softmax(-1)
    lengths = (p - torch.nn.functional.one_hot(targets, VOCAB)).square().sum(-1)
    for correct, gradients, entropy in ranks.run(hits, world, padded, targets):
        assert correct.tolist() == expected.tolist()
        torch.testing.assert_close(gradients, lengths)
        torch.testing.assert_close(entropy, -(p * p.log()).sum(-1))


TOP = 30
"""More of the likeliest tokens than one of two ranks has."""
RULED_OUT = 20
"""The first token of the second of two ranks, which has 20 each."""


def tied_problem(padded):
    """Whole numbers, so that many logits are equal; three tokens beside each target, of which one is the target."""
    hidden, head, targets, _ = problem(padded)
    targets = torch.where(targets == RULED_OUT, targets + 1, targets)
    beside = torch.stack([targets, (targets + 5) % RULED_OUT, RULED_OUT + 1 + targets % 16], dim=1)
    mix = torch.randn(POSITIONS, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return hidden.abs().round() + 1, head.round(), torch.cat([targets[:, None], beside], dim=1), mix


def tokens_beside(info, padded, rows):
    """This rank's log-probs beside the targets with a gradient, and with a token ruled out the likeliest tokens."""
    from roll.distributed.process_group import init_process_group

    if info.world_size > 1:
        init_process_group(info, "gloo")
    hidden, head, ids, mix = tied_problem(padded)
    part = padded // info.world_size
    group = torch.distributed.group.WORLD if info.world_size > 1 else None
    split = {"group": group, "vocab_start": info.rank * part, "vocab": VOCAB}
    options = {"temperature": TEMPERATURE, "chunk_rows": rows, **split}
    weight = head[info.rank * part : (info.rank + 1) * part].clone()
    hidden.requires_grad_()
    outputs = vocab_parallel_outputs(hidden, weight, ids, HeadRequest(), **options)
    loss = (outputs.logprobs * mix[:, 0]).sum() + (outputs.student_logprobs * mix[:, 1:]).sum()
    (grad,) = torch.autograd.grad(loss, hidden)
    if 0 <= RULED_OUT - info.rank * part < part:
        weight[RULED_OUT - info.rank * part] = -torch.inf
    with torch.no_grad():
        hidden[-1] = torch.nan
        top = vocab_parallel_outputs(hidden, weight, ids[:, 0], HeadRequest(top_k=TOP), **options)
    return outputs.student_logprobs.detach(), grad, top


@pytest.mark.parametrize("rows", [None, 4])
@pytest.mark.parametrize(("world", "padded"), [(1, 64), (2, 40), (2, 80)])
def test_tokens_beside_the_targets_and_the_likeliest_of_a_split_vocabulary(ranks, world, padded, rows):
    hidden, head, ids, mix = tied_problem(padded)
    hidden.requires_grad_()
    logits = hidden @ head[:VOCAB].T
    want = (logits / TEMPERATURE).log_softmax(-1).gather(-1, ids)
    (slope,) = torch.autograd.grad((want * mix).sum(), hidden)
    logits = logits.detach().index_fill(1, torch.tensor([RULED_OUT]), -torch.inf)
    logits[-1] = torch.nan
    order = logits.nan_to_num(nan=-torch.inf, neginf=-torch.inf).sort(dim=-1, descending=True, stable=True)
    order = order.indices[:, :TOP]
    assert (logits.gather(-1, order).diff() == 0).any(), "nothing is tied"
    table = (logits / TEMPERATURE).log_softmax(-1)
    for student, grad, top in ranks.run(tokens_beside, world, padded, rows):
        torch.testing.assert_close(student, want[:, 1:].detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad, slope, rtol=1e-10, atol=1e-12)
        assert torch.equal(top.top_ids, order)
        close = {"rtol": 1e-12, "atol": 1e-12, "equal_nan": True}
        torch.testing.assert_close(top.top_logprobs, table.gather(-1, order), **close)
        torch.testing.assert_close(top.logprobs, table.gather(-1, ids[:, :1])[:, 0], **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_rank_agrees_with_the_unsplit_kernel(dtype):
    hidden, head, targets, mix = problem(VOCAB, dtype)
    hidden.requires_grad_()
    head.requires_grad_()
    logits = hidden @ head.T
    want = logprobs_and_entropy(logits, targets, temperature=TEMPERATURE)
    assert torch.equal(want[0], logprobs_and_entropy(logits, targets, temperature=TEMPERATURE, with_entropy=False)[0])
    gradients = torch.autograd.grad((want[0] * mix[0]).sum() + (want[1] * mix[1]).sum(), (hidden, head))
    options = {"temperature": TEMPERATURE, "group": None, "vocab_start": 0, "vocab": VOCAB}
    outputs = vocab_parallel_outputs(hidden, head, targets, HeadRequest(entropy=True), **options)
    mine = outputs.logprobs, outputs.entropy
    own = torch.autograd.grad((mine[0] * mix[0]).sum() + (mine[1] * mix[1]).sum(), (hidden, head))
    assert mine[0].dtype == mine[1].dtype == torch.float32
    for a, b in [*zip(mine, want, strict=True), *zip(own, gradients, strict=True)]:
        torch.testing.assert_close(a, b, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-5)


def test_a_token_ruled_out_by_its_logit_adds_nothing():
    hidden = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[0.0], [0.0], [-torch.inf]], dtype=torch.float64)
    options = {"temperature": 1.0, "group": None, "vocab_start": 0, "vocab": 3}
    outputs = vocab_parallel_outputs(hidden, weight, torch.tensor([1]), HeadRequest(entropy=True), **options)
    assert outputs.logprobs.item() == pytest.approx(-torch.tensor(2.0).log().item())
    assert outputs.entropy.item() == pytest.approx(torch.tensor(2.0).log().item())


def test_frozen_heads_get_no_gradient_and_greedy_sampling_has_no_scores():
    hidden, head, targets, _ = problem(VOCAB)
    options = {"group": None, "vocab_start": 0, "vocab": VOCAB}
    hidden.requires_grad_()
    outputs = vocab_parallel_outputs(hidden, head, targets, HeadRequest(), temperature=1.0, **options)
    outputs.logprobs.sum().backward()
    assert head.grad is None and hidden.grad is not None
    with pytest.raises(ValueError, match="temperature"):
        vocab_parallel_outputs(hidden, head, targets, HeadRequest(), temperature=0.0, **options)
