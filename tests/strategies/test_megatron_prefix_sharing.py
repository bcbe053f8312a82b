"""Beginnings that rows share on Megatron: computed once, with the numbers of rows by themselves in every layout."""

from __future__ import annotations

import pytest
import torch
from layout_contract import CP2, EP2, FAMILIES, PLAIN, PP2, SP, TP2, VP2, layout_spec, relative
from prefix_rows import answers, turns
from test_hf_prefix_sharing import OFF, ON, PACKED, surprise
from torch import nn
from train_contract import LOSS, build, make_batch, make_spec, weights_of, with_worker

from roll.strategies.base import LossFn
from roll.strategies.training.micro import lay_out_tree, shares_prefixes, widen
from roll.types.batch import TokenOutputs

NEEDS = ("logprobs", "entropy")
ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
ALONE = {"per_device_train_batch_size": 1}


def of_all_columns(outputs, batch, sizes):
    """`surprise`, of a sum over a teacher's tokens where there are some."""
    columns = {name: column.reshape(len(column), -1).sum(-1) for name, column in outputs.columns().items()}
    return surprise(outputs.with_columns(**columns), batch, sizes)


def played(info, spec, make, needs=NEEDS):
    """(outputs before, loss of a step, gradients under the names of weights, metrics) of this rank."""
    strategy, batch = build(spec, info), make()
    place, gradients = strategy.layout, {}
    batch = batch.select(list(range(place.dp_rank, len(batch), place.dp_size)))
    modules = getattr(strategy, "_modules", None) or [strategy._model]
    for head in (module.value_head for module in modules if hasattr(module, "value_head")):
        nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(1))
    before = strategy.forward(batch, needs)

    def keep(*_):
        for parameter in (parameter for module in modules for parameter in module.parameters()):
            if parameter.requires_grad:
                parameter.data.copy_(getattr(parameter, "main_grad", parameter.grad))
        gradients.update((name, tensor.clone()) for name, tensor in strategy.named_weights())
        return 0.0, True

    if spec.worker.strategy_args.strategy_name.startswith("megatron"):
        strategy._optimizer.step = keep
    else:
        strategy._apply = keep
    metrics = strategy.train_step(batch, LossFn(compute=of_all_columns, needs=needs)).result()
    return place, before, gradients, metrics


def alone(path, make, needs=NEEDS, **changes):
    """Every row by itself on a Hugging Face model."""
    spec = make_spec(path, worker={**OFF, "infer_batch_size": 1}, training=ALONE, **changes)
    return played(None, spec, make, needs)


def same(answers_of_ranks, expected, bound=1e-5):
    kept = [answer for answer in answers_of_ranks if answer[0].collects]
    outputs = TokenOutputs.concat([before for _, before, _, _ in kept]).reorder(expected[1].row_ids)
    for name, column in expected[1].columns().items():
        torch.testing.assert_close(outputs.columns()[name], column, rtol=0, atol=bound)
    assert sum(metrics["loss"] for _, _, _, metrics in kept) == pytest.approx(expected[3]["loss"], abs=bound)
    found = kept[0][2]
    assert found.keys() == expected[2].keys()
    wrong = {name: relative(found[name], gradient) for name, gradient in expected[2].items()}
    assert max(wrong.values()) < bound, wrong


LAYOUTS = {
    "one rank": (1, {}, "qwen2", answers),
    "tensor 2, sequence": (2, {**TP2, **SP}, "mistral", turns),
    "interleaved": (2, VP2, "qwen3", answers),
    "context 2": (2, CP2, "llama", answers),
    "tensor 2 x pipeline 2, sequence": (4, {**TP2, **PP2, **SP}, "llama", answers),
    "expert 2 over data ranks": (2, EP2, "qwen3_moe", answers),
    "expert 2, gathered": (2, {**EP2, **ALLGATHER}, "qwen3_moe", answers),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_loss_and_gradients_are_those_of_rows_by_themselves(ranks, model_of, layout):
    world, options, family, make = LAYOUTS[layout]
    path = model_of(family, layers=4, **FAMILIES[family])
    worker = {**ON, **(PACKED if layout == "context 2" else {})}
    found = ranks.run(played, world, layout_spec(path, "megatron_train", {**options, **PLAIN}, worker=worker), make)
    same(found, alone(path, make))
    assert all(answer[3]["actor/shared_tokens"] > 0 for answer in found)
    if layout == "one rank":
        # The tokens of the rows, and of their tree: see test_hf_prefix_sharing.py.
        assert found[0][3]["actor/shared_tokens"] == 109 - 42


def test_critics_and_what_a_student_says_of_a_teachers_tokens(ranks, model_of):
    path = model_of("llama", layers=4)
    cases = ((turns, ("values",), {"kind": "value"}), (taught, ("logprobs", "student_logprobs"), {}))
    for make, needs, changes in cases:
        spec = layout_spec(path, "megatron_train", {**TP2, **SP, **PLAIN}, worker=ON, **changes)
        same(ranks.run(played, 2, spec, make, needs), alone(path, make, needs, **changes))


def taught():
    batch = answers()
    ids = [(batch.token_ids + 1) % 90, (batch.token_ids * 3 + torch.arange(batch.num_tokens)) % 80 + 2]
    return batch.with_columns(teacher_ids=torch.stack(ids, dim=1))


def steps_of(info, specs):
    """Weights after a step on rows that share nothing, for each way."""
    steps = []
    for spec in specs:
        strategy = build(spec, info)
        strategy.train_step(make_batch(), LOSS)
        steps.append((strategy._micros.shares_prefixes, weights_of(strategy)))
    return steps


def test_rows_that_share_nothing_are_computed_as_ever_to_the_last_bit(ranks, model_of):
    spec = layout_spec(model_of("llama"), "megatron_train", {})
    by_default, off = ranks.run(steps_of, 1, [spec, with_worker(spec, **OFF)])[0]
    assert (by_default[0], off[0]) == (True, False)
    assert all(torch.equal(by_default[1][name], weight) for name, weight in off[1].items())


def test_a_widened_tree_has_its_padding_in_rows_of_their_own():
    layout = lay_out_tree(answers(), torch.device("cpu"))
    assert layout.ids.shape == (1, 38)  # 9 + 3 + 2 + 3 after the first prompt, 8 + 1 + 3 + 2 + 4 after the second, 3
    wide = widen(layout, 8, (3, 45))
    assert wide.ids.shape == (3, 48)
    assert wide.tree.lengths == (*layout.tree.lengths, 10, 48, 48)
    assert wide.tree.parents == (*layout.tree.parents, -1, -1, -1)
    assert torch.equal(wide.positions[0, :38], layout.positions[0])
    assert torch.equal(wide.index, layout.index)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"moe_aux_loss_coeff": 0.1}, "moe_aux_loss_coeff balances the tokens of whole rows"),
        ({"additional_configs": {"moe_z_loss_coeff": 0.1}}, "moe_z_loss_coeff takes a mean over the tokens of whole"),
    ],
)
def test_experts_that_count_tokens_keep_every_row_whole(model_of, options, why):
    spec = layout_spec(model_of("qwen3_moe"), "megatron_train", options)
    assert not shares_prefixes(spec, packed=True, accelerated=False)
    with pytest.raises(ValueError, match=f"actor_train.use_prefix_sharing: .*{why}.*Remove it"):
        shares_prefixes(with_worker(spec, **ON), packed=True, accelerated=False)
