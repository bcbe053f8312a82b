"""Router replay: tokens go to the experts that the engine sent them to, on every training backend."""

from __future__ import annotations

import pytest
import torch
from layout_contract import CP2, EP2, PLAIN, PP2, SP, TP2, VP2, layout_spec
from prefix_rows import answers
from test_megatron_prefix_sharing import ALLGATHER, ALONE, played, same
from torch import nn
from train_contract import build, make_spec

from roll.strategies.hf.hf_expert_replay import replayed

EXPERTS, CHOSEN, LAYERS = 4, 2, 4


def told():
    """`answers` with experts drawn at random; of every row's last token, and of some others, nothing is known."""
    batch = answers()
    generator = torch.Generator().manual_seed(5)
    drawn = torch.rand(batch.num_tokens, LAYERS, EXPERTS, generator=generator).topk(CHOSEN, dim=-1).indices
    drawn[batch.offsets[1:] - 1] = -1
    drawn[::7] = -1
    return batch.with_columns(routed_experts=drawn.to(torch.int16))


def test_scores_are_the_models_and_the_choice_is_the_engines():
    scores = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]], requires_grad=True)
    own, theirs = torch.tensor([[3, 2], [0, 1]]), torch.tensor([[0, 2], [-1, -1]])
    found, chosen = replayed(scores, own, theirs)
    assert chosen.tolist() == [[0, 2], [0, 1]]
    torch.testing.assert_close(found, torch.tensor([[0.1, 0.3], [0.4, 0.3]]))
    found.sum().backward()
    assert scores.grad.tolist() == [[1, 0, 1, 0], [1, 1, 0, 0]]


def by_hand(path, batch):
    """Log-probs of transformers' model, whose routers are given the experts of one row after another."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    assert len(routers) == LAYERS
    logprobs = []
    for i in range(len(batch)):
        ids, experts = batch.row("token_ids", i), batch.row("routed_experts", i)
        for layer, router in enumerate(routers):
            router.forward = routed(router, experts[:, layer])
        with torch.no_grad():
            table = model(ids[None]).logits[0, :-1].log_softmax(-1)
        logprobs.append(torch.cat([torch.zeros(1), table.gather(-1, ids[1:, None])[:, 0]]))
    return torch.cat(logprobs) * batch.action_mask


def routed(router, experts):
    def forward(hidden):
        probabilities = nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight).softmax(-1)
        own = probabilities.argsort(dim=-1, descending=True)[:, :CHOSEN]
        chosen = torch.where(experts == -1, own, experts.long())
        weights = torch.stack([probabilities[torch.arange(len(chosen)), chosen[:, k]] for k in range(CHOSEN)], dim=-1)
        return None, weights / weights.sum(-1, keepdim=True), chosen

    return forward


@pytest.fixture
def path(model_of):
    return model_of("qwen3_moe", layers=LAYERS)


@pytest.mark.parametrize("worker", [{}, {"use_sequence_packing": True}])
def test_hugging_face_models_compute_with_the_experts_told(path, worker):
    batch = told()
    found = build(make_spec(path, worker=worker)).forward(batch, ("logprobs",)).logprobs
    torch.testing.assert_close(found, by_hand(path, batch), rtol=0, atol=1e-5)
    assert (found - build(make_spec(path)).forward(answers(), ("logprobs",)).logprobs).abs().max() > 1e-4


def forwarded(info, spec, batches):
    strategy = build(spec, info)
    return [strategy.forward(batch, ("logprobs",)).logprobs for batch in batches]


def test_a_model_without_experts_refuses_them(model_of):
    strategy = build(make_spec(model_of("qwen3", layers=LAYERS)))
    with pytest.raises(ValueError, match="no routers"):
        strategy.forward(told(), ("logprobs",))


@pytest.mark.parametrize("backend", ["hf", "megatron_train"])
def test_layers_have_the_numbers_of_the_whole_model_and_those_without_experts_do_not_count(ranks, model_of, backend):
    path = model_of("qwen3_moe", layers=LAYERS, mlp_only_layers=[0, 2])
    batch = told()
    dense, sparse = batch.routed_experts.clone(), batch.routed_experts.clone()
    dense[:, [0, 2]] = 1
    sparse[:, 1] = sparse[:, 1].roll(1, 0)
    batches = [batch.with_columns(routed_experts=experts) for experts in (batch.routed_experts, dense, sparse)]
    if backend == "hf":
        base, same_numbers, others = forwarded(None, make_spec(path), batches)
    else:
        base, same_numbers, others = ranks.run(forwarded, 1, layout_spec(path, backend, PLAIN), batches)[0]
    torch.testing.assert_close(same_numbers, base, rtol=0, atol=0)
    assert (others - base).abs().max() > 1e-4


LAYOUTS = {
    "one rank": (1, {}, {}),
    "expert 2": (2, EP2, {}),
    "expert 2, gathered": (2, {**EP2, **ALLGATHER}, {}),
    "tensor 2, sequence": (2, {**TP2, **SP}, {}),
    "expert 2 over tensor ranks, packed": (
        2,
        {**TP2, **SP, **EP2, "expert_tensor_parallel_size": 1},
        {"use_sequence_packing": True},
    ),
    "context 2": (2, CP2, {"use_sequence_packing": True}),
    "interleaved": (2, VP2, {}),
    "expert 2 x pipeline 2": (4, {**EP2, **PP2}, {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_megatron_gives_the_numbers_and_gradients_of_hugging_face_models(ranks, path, layout):
    world, options, worker = LAYOUTS[layout]
    spec = layout_spec(path, "megatron_train", {**options, **PLAIN}, worker=worker)
    expected = played(None, make_spec(path, worker={"infer_batch_size": 1}, training=ALONE), told)
    same(ranks.run(played, world, spec, told), expected)


def refused(info, spec):
    try:
        build(spec, info).forward(told(), ("logprobs",))
    except ValueError as error:
        return str(error)
    return None


def test_where_a_router_is_not_told_the_role_says_so(ranks, path):
    spec = layout_spec(
        path, "megatron_train", {"moe_layer_recompute": True}, model={"disable_gradient_checkpointing": True}
    )
    assert "recomputed expert layers" in ranks.run(refused, 1, spec)[0]
