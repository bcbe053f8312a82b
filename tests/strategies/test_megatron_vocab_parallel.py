"""Log-probs and entropy from a vocabulary that is split over ranks: those of the whole vocabulary, in float64."""

from __future__ import annotations

import pytest
import torch

from roll.strategies.megatron.vocab_parallel import vocab_parallel_correct, vocab_parallel_logprobs
from roll.utils.logits import logprobs_and_entropy, logprobs_from_logits

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
    logprobs, entropy = vocab_parallel_logprobs(
        hidden,
        weight,
        targets,
        temperature=TEMPERATURE,
        group=torch.distributed.group.WORLD if info.world_size > 1 else None,
        vocab_start=info.rank * part,
        vocab=VOCAB,
        with_entropy=with_entropy,
        chunk_rows=rows,
    )
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
    return vocab_parallel_correct(hidden, weight, targets, group=group, vocab_start=info.rank * part, vocab=VOCAB)


@pytest.mark.parametrize(("world", "padded"), [(1, 37), (1, 64), (2, 40), (2, 80)])
def test_the_likeliest_token_of_a_split_vocabulary(ranks, world, padded):
    hidden, head, _, _ = problem(padded)
    best = (hidden @ head[:VOCAB].T).argmax(-1)
    expected = torch.tensor([1.0, 0.0, 1.0] * 4)[:POSITIONS]
    targets = torch.where(expected.bool(), best, (best + 1) % VOCAB)
    for answer in ranks.run(hits, world, padded, targets):
        assert answer.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_rank_agrees_with_the_unsplit_kernel(dtype):
    hidden, head, targets, mix = problem(VOCAB, dtype)
    hidden.requires_grad_()
    head.requires_grad_()
    logits = hidden @ head.T
    want = logprobs_and_entropy(logits, targets, temperature=TEMPERATURE)
    assert torch.equal(want[0], logprobs_from_logits(logits, targets, temperature=TEMPERATURE))
    gradients = torch.autograd.grad((want[0] * mix[0]).sum() + (want[1] * mix[1]).sum(), (hidden, head))
    mine = vocab_parallel_logprobs(
        hidden, head, targets, temperature=TEMPERATURE, group=None, vocab_start=0, vocab=VOCAB, with_entropy=True
    )
    own = torch.autograd.grad((mine[0] * mix[0]).sum() + (mine[1] * mix[1]).sum(), (hidden, head))
    assert mine[0].dtype == mine[1].dtype == torch.float32
    for a, b in [*zip(mine, want, strict=True), *zip(own, gradients, strict=True)]:
        torch.testing.assert_close(a, b, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-5)


def test_a_token_ruled_out_by_its_logit_adds_nothing():
    hidden = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[0.0], [0.0], [-torch.inf]], dtype=torch.float64)
    logprobs, entropy = vocab_parallel_logprobs(
        hidden, weight, torch.tensor([1]), temperature=1.0, group=None, vocab_start=0, vocab=3, with_entropy=True
    )
    assert logprobs.item() == pytest.approx(-torch.tensor(2.0).log().item())
    assert entropy.item() == pytest.approx(torch.tensor(2.0).log().item())


def test_frozen_heads_get_no_gradient_and_greedy_sampling_has_no_scores():
    hidden, head, targets, _ = problem(VOCAB)
    options = {"group": None, "vocab_start": 0, "vocab": VOCAB, "with_entropy": False}
    logprobs, _ = vocab_parallel_logprobs(hidden.requires_grad_(), head, targets, temperature=1.0, **options)
    logprobs.sum().backward()
    assert head.grad is None and hidden.grad is not None
    with pytest.raises(ValueError, match="temperature"):
        vocab_parallel_logprobs(hidden, head, targets, temperature=0.0, **options)
