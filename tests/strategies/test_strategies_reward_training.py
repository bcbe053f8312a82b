"""Reward models learn alike on every backend and layout: scores, losses, gradients and weights of a plain loop."""

from __future__ import annotations

import functools

import pytest
import torch
from layout_contract import (
    CLIP,
    CP2,
    DECAY,
    EPSILON,
    FSDP,
    LEARNING_RATE,
    PACKED,
    PP2,
    SP,
    STEPS,
    TP2,
    each,
    layout_spec,
    relative,
)
from test_deepspeed_steps import STAGES
from test_strategies_units import PAIRS, PREFERRED, dealt
from tiny_classifiers import build_tiny_classifier
from train_contract import build, make_batch

from roll.configs.schema.preference_config import RewardTrainingConfig
from roll.pipelines.workers.preference_losses import reward_objective
from roll.types.batch import TokenOutputs

MARGIN, CENTRE = 0.5, 0.05


def scored_batch():
    """The contract's rows as pairs with a margin, each with its last token as the one that is scored."""
    batch = make_batch()
    last = torch.zeros_like(batch.action_mask).index_fill(0, batch.offsets[1:] - 1, True)
    columns = {**batch.columns(), "action_mask": last, "loss_mask": last, "preferred": torch.tensor(PREFERRED)}
    columns |= {"targets": torch.full((len(batch),), MARGIN)}
    return type(batch)(
        row_ids=batch.row_ids, group_ids=batch.group_ids, unit_ids=PAIRS, offsets=batch.offsets, **columns
    )


def play(info, spec):
    """One rank's part of the run."""
    strategy, batch = build(spec, info), scored_batch()
    layout = strategy.layout
    mine = dealt(batch, layout.dp_rank, layout.dp_size)
    outputs = strategy.forward(mine, ("values",))
    loss = reward_objective(RewardTrainingConfig(pipeline="reward_model", center_rewards_coefficient=CENTRE), "reward")
    history = [strategy.train_step(mine, loss) for _ in range(STEPS)]
    weights = {name: tensor.detach().clone() for name, tensor in strategy.named_weights()}
    return {
        "layout": layout,
        "outputs": outputs if layout.collects else None,
        "norms": [metrics.result()["actor/grad_norm"] for metrics in history] if info.rank == 0 else None,
        "weights": weights if info.rank == 0 else None,
    }


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return build_tiny_classifier(tmp_path_factory.mktemp("classifier") / "model", seed=3)


@functools.cache
def by_hand(path):
    """(scores before, norms, weights after) of plain transformers, one unpadded row at a time."""
    from transformers import AutoModelForSequenceClassification

    model, batch = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32), scored_batch()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, eps=EPSILON)

    def scores():
        hidden = [model.model(batch.row("token_ids", i)[None]).last_hidden_state[0, -1] for i in range(len(batch))]
        return torch.stack([model.score(last)[0] for last in hidden])

    with torch.no_grad():
        before = scores()
    first, second, norms = torch.tensor([0, 4, 3]), torch.tensor([2, 1, 5]), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        found = scores()
        apart = found[first] - found[second] - MARGIN
        loss = torch.log1p(torch.exp(-apart)) + CENTRE * (found[first] + found[second]) ** 2
        loss.mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return before, norms, {name: value.detach().clone() for name, value in model.state_dict().items()}


ZERO_1, ZERO_3 = ({"zero_optimization": STAGES[stage]} for stage in ("stage 1", "stage 3"))
LAYOUTS = {
    # backend and ranks -> (options, changes) of roles that share a process group
    "fsdp2, one rank": ("fsdp2_train", 1, [({}, {})]),
    "fsdp2, two ranks": (
        "fsdp2_train",
        2,
        [*((options, {}) for world, options in FSDP.values() if world == 2), ({}, {"model": {"ulysses_size": 2}})],
    ),
    "deepspeed": ("deepspeed_train", 2, [(ZERO_1, {}), (ZERO_3, {})]),
    "megatron, data 2": ("megatron_train", 2, [({}, {})]),
    "megatron, tensor 2": ("megatron_train", 2, [({**TP2, **SP}, {})]),
    "megatron, pipeline 2": ("megatron_train", 2, [(PP2, {})]),
    "megatron, context 2": ("megatron_train", 2, [(CP2, {}), (CP2, PACKED)]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reward_models_learn_as_a_plain_loop(ranks, classifier, layout):
    strategy, world, cases = LAYOUTS[layout]
    specs = [layout_spec(classifier, strategy, options, kind="reward", **changes) for options, changes in cases]
    before, norms, weights = by_hand(classifier)
    for case, *answers in zip(cases, *ranks.run(each, world, play, specs), strict=True):
        kept = sorted((a for a in answers if a["layout"].collects), key=lambda a: a["layout"].dp_rank)
        outputs = TokenOutputs.concat([answer["outputs"] for answer in kept]).reorder(make_batch().row_ids)
        assert relative(outputs.require("values")[scored_batch().action_mask], before) <= 1e-5, case
        assert answers[0]["norms"] == pytest.approx(norms, rel=1e-4), case
        assert answers[0]["weights"].keys() == weights.keys()
        wrong = {name: relative(answers[0]["weights"][name], value) for name, value in weights.items()}
        assert max(wrong.values()) <= 1e-4, (case, wrong)
