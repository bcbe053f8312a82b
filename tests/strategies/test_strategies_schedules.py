"""Schedules of learning rate and weight decay: by hand, and equal to transformers' and Megatron-core's functions."""

from __future__ import annotations

import functools
import math
from typing import get_args, get_type_hints

import pytest
import torch
import transformers.optimization as theirs
from train_contract import LOSS, build, make_batch, make_spec
from transformers.trainer_utils import SchedulerType

from roll.configs.parsing.build_config import build as build_config
from roll.configs.schema.training_args import TrainingArgs
from roll.strategies.training.optim import schedule_from, weight_decay_from

TOTAL = 40


def shares(total=TOTAL, **keys):
    return [schedule_from(TrainingArgs(**keys), total)(step) for step in range(total + 3)]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        # 10 steps, progress 0, 0.1, ..., 0.9, 1
        ({"lr_scheduler_type": "polynomial", "lr_decay_power": 2.0}, [(1 - i / 10) ** 2 for i in range(11)]),
        ({"lr_scheduler_type": "polynomial", "min_lr_ratio": 0.5}, [1 - i / 20 for i in range(11)]),
        # one and a half waves: down at 1/3, up at 2/3, down at 1
        ({"lr_scheduler_type": "cosine", "num_cycles": 1.5},
         [(1 + math.cos(3 * math.pi * i / 10)) / 2 for i in range(11)]),
        # two falls of 5 steps each
        ({"lr_scheduler_type": "cosine_with_restarts", "num_cycles": 2},
         [(1 + math.cos(math.pi * (i % 5) / 5)) / 2 for i in range(10)] + [0.0]),
        # T = 4: 1, sqrt(4/5), sqrt(4/6), ... but not below 0.6
        ({"lr_scheduler_type": "inverse_square_root", "lr_timescale": 4, "min_lr_ratio": 0.6},
         [max(0.6, math.sqrt(4 / (4 + i))) for i in range(11)]),
        # T is the warm-up: 3 rises, then sqrt(3/3), sqrt(3/4)
        ({"lr_scheduler_type": "inverse_square_root", "warmup_steps": 3},
         [0.25, 0.5, 0.75, *(math.sqrt(3 / (3 + i)) for i in range(8))]),
        # from 0.2: 0.2 + 0.8 * 1/4, ...
        ({"warmup_steps": 3, "warmup_init_ratio": 0.2}, [0.4, 0.6, 0.8, *[1.0] * 8]),
        # falls in the first 4 steps and stays
        ({"lr_scheduler_type": "linear", "lr_decay_steps": 4, "min_lr_ratio": 0.1},
         [1, 0.775, 0.55, 0.325, *[0.1] * 7]),
        # stays 6 steps and falls in 4, y = 0, 1/4, 1/2, 3/4, 1
        ({"lr_scheduler_type": "wsd", "wsd_decay_ratio": 0.4}, [*[1] * 7, 0.75, 0.5, 0.25, 0]),
        ({"lr_scheduler_type": "wsd", "wsd_decay_ratio": 0.4, "wsd_decay_style": "minus_sqrt"},
         [*[1] * 7, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0]),
        ({"lr_scheduler_type": "wsd", "wsd_decay_ratio": 0.4, "wsd_decay_style": "exponential"},
         [*[1] * 7, 2 * 0.5**0.25 - 1, 2 * 0.5**0.5 - 1, 2 * 0.5**0.75 - 1, 0]),
        ({"lr_scheduler_type": "wsd", "wsd_decay_ratio": 0.4, "wsd_decay_style": "cosine"},
         [*[1] * 7, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0]),
    ],
)  # fmt: skip
def test_schedules_by_hand(keys, expected):
    assert shares(10, **keys)[:11] == pytest.approx(expected, abs=1e-12)


def lambda_of(make, **keys):
    """Share of the peak by step, of a schedule of transformers."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return make(optimizer, **keys).lr_lambdas[0]


W = {"num_warmup_steps": 8}
ALL = {**W, "num_training_steps": TOTAL}
MADE = {
    "constant": (theirs.get_constant_schedule_with_warmup, W, {}),
    "linear": (theirs.get_linear_schedule_with_warmup, ALL, {}),
    "cosine": (theirs.get_cosine_schedule_with_warmup, {**ALL, "num_cycles": 0.75}, {"num_cycles": 0.75}),
    "cosine with a least": (
        theirs.get_cosine_with_min_lr_schedule_with_warmup, {**ALL, "min_lr_rate": 0.2}, {"min_lr_ratio": 0.2}),
    "cosine_with_restarts": (
        theirs.get_cosine_with_hard_restarts_schedule_with_warmup, {**ALL, "num_cycles": 3}, {"num_cycles": 3.0}),
    "polynomial": (
        theirs.get_polynomial_decay_schedule_with_warmup, {**ALL, "lr_end": 0.05, "power": 1.7},
        {"min_lr_ratio": 0.05, "lr_decay_power": 1.7}),
    "inverse_square_root": (theirs.get_inverse_sqrt_schedule, W, {}),
    "inverse_square_root slowly": (theirs.get_inverse_sqrt_schedule, {**W, "timescale": 30}, {"lr_timescale": 30}),
    **{f"wsd {style}": (
        theirs.get_wsd_schedule,
        {**ALL, "num_decay_steps": 8, "decay_type": {"minus_sqrt": "1-sqrt"}.get(style, style), "min_lr_ratio": 0.1},
        {"wsd_decay_ratio": 0.25, "wsd_decay_style": style, "min_lr_ratio": 0.1},
    ) for style in ("linear", "cosine", "minus_sqrt")},
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_after_the_warm_up_schedules_are_those_of_transformers(name):
    make, keys, ours = MADE[name]
    schedule, other = name.split(" ")[0], lambda_of(make, **keys)
    found = shares(lr_scheduler_type=schedule, warmup_steps=8, **ours)
    assert found[8 : TOTAL + 1] == pytest.approx([other(step) for step in range(8, TOTAL + 1)], abs=1e-14)
    assert found[:8] == [(step + 1) / 9 for step in range(8)]  # ours, whose first step isn't lost


NAMED = {
    # name -> (its options in transformers, ours)
    "constant": ({}, {}),
    "constant_with_warmup": ({}, {}),
    "linear": ({}, {}),
    "cosine": ({}, {}),
    "cosine_with_restarts": ({"num_cycles": 2}, {"num_cycles": 2.0}),
    "polynomial": ({"lr_end": 0.0}, {}),
    "inverse_sqrt": ({}, {}),
    "cosine_with_min_lr": ({"min_lr": 0.3}, {"min_lr_ratio": 0.3}),
    "warmup_stable_decay": ({"num_decay_steps": 12}, {"num_decay_steps": 12}),
    "warmup_stable_decay in a line": (
        {"num_decay_steps": 12, "decay_type": "linear", "min_lr_ratio": 0.2},
        {"num_decay_steps": 12, "wsd_decay_style": "linear", "min_lr_ratio": 0.2}),
    "warmup_stable_decay by a root": (
        {"num_decay_steps": 12, "decay_type": "1-sqrt"}, {"num_decay_steps": 12, "wsd_decay_style": "1-sqrt"}),
    "warmup_stable_decay in waves": (
        {"num_decay_steps": 12, "num_cycles": 1.5}, {"num_decay_steps": 12, "num_cycles": 1.5}),
    "warmup_stable_decay from the start": ({"num_decay_steps": 60}, {"num_decay_steps": 60}),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMED)
def test_a_name_that_transformers_has_is_its_schedule(case):
    options, ours = NAMED[case]
    name = case.split(" ")[0]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    other = theirs.get_scheduler(name, optimizer, 8, TOTAL, options).lr_lambdas[0]
    args, violations = build_config(TrainingArgs, {"lr_scheduler_type": name, "warmup_steps": 8, **ours})
    assert not violations
    mine = schedule_from(args, TOTAL)
    steps = range(8, TOTAL + 1)
    assert [mine(step) for step in steps] == pytest.approx([other(step) for step in steps], abs=1e-14)
    # The warm-up ends at the peak in both, and begins at the lowest rate where that schedule's does.
    assert name != "warmup_stable_decay" or mine(0) >= args.min_lr_ratio


def test_every_name_that_both_have_is_compared():
    schedule = TrainingArgs.__dataclass_fields__["lr_scheduler_type"]
    names = {*get_args(get_type_hints(TrainingArgs)["lr_scheduler_type"]), *schedule.metadata["also"]}
    assert {name.value for name in SchedulerType} & names == {case.split(" ")[0] for case in NAMED}


def megatron(**keys):
    """Megatron-core's scheduler, without an optimizer to set."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    optimizer.param_groups[0] |= {"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False}
    rest = {"start_wd": 0.0, "end_wd": 0.0, "wd_incr_steps": TOTAL, "wd_incr_style": "constant"}
    given = {"init_lr": 0.0, "max_lr": 1.0, "min_lr": 0.1, "lr_warmup_steps": 0, "lr_decay_steps": TOTAL}
    return OptimizerParamScheduler(optimizer, **{"lr_decay_style": "constant", **given, **rest, **keys})


@pytest.mark.parametrize("style", ["linear", "cosine", "minus_sqrt", "exponential"])
def test_the_fall_of_wsd_is_that_of_megatron(style):
    scheduler = megatron(lr_decay_style="WSD", wsd_decay_steps=10, lr_wsd_decay_style=style)
    ours = shares(lr_scheduler_type="wsd", wsd_decay_ratio=0.25, wsd_decay_style=style, min_lr_ratio=0.1)
    for step in range(TOTAL + 3):
        scheduler.num_steps = step
        assert ours[step] == pytest.approx(scheduler.get_lr({}), abs=1e-14)


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_the_weight_decay_moves_as_megatrons(style):
    scheduler = megatron(start_wd=0.02, end_wd=0.3, wd_incr_style=style)
    args = TrainingArgs(weight_decay=0.02, end_weight_decay=0.3, weight_decay_incr_style=style)
    for step in range(TOTAL + 3):
        scheduler.num_steps = step
        assert weight_decay_from(args, TOTAL)(step) == pytest.approx(scheduler.get_wd(), abs=1e-14)


def test_the_weight_decay_of_a_step_reaches_the_matrices_alone(tiny_model, tmp_path):
    # 10 planned steps from 0 to 1: the first doesn't decay, the third decays by 0.2; vectors never do.
    still = {"adam_beta1": 0.0, "adam_beta2": 0.0, "adam_epsilon": 1e9}  # steps of AdamW vanish
    spec = make_spec(tiny_model, training={"end_weight_decay": 1.0, "learning_rate": 0.1, **still})
    strategy = build(spec)
    weights = [dict(strategy._module.named_parameters())]
    name = "lm.model.layers.0.mlp.up_proj.weight"
    norm = "lm.model.layers.0.input_layernorm.weight"
    kept = {key: [value.detach().clone()] for key, value in weights[0].items() if key in (name, norm)}
    assert len(kept) == 2
    strategy.save(tmp_path / "start")
    for _ in range(3):
        strategy.train_step(make_batch(), LOSS)
        for key, values in kept.items():
            values.append(weights[0][key].detach().clone())
    for before, after, decay in zip(kept[name], kept[name][1:], (0.0, 0.1, 0.2), strict=False):
        torch.testing.assert_close(after, before * (1 - 0.1 * decay), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(kept[norm][-1], kept[norm][0], rtol=1e-6, atol=1e-7)


def test_moving_rates_go_on_bit_for_bit_after_a_checkpoint(tiny_model, tmp_path):
    training = {
        "lr_scheduler_type": "wsd", "wsd_decay_ratio": 0.5, "wsd_decay_style": "exponential", "warmup_steps": 2,
        "warmup_init_ratio": 0.1, "weight_decay": 0.1, "end_weight_decay": 0.5, "weight_decay_incr_style": "cosine",
    }  # fmt: skip
    spec, batch = make_spec(tiny_model, training=training), make_batch()
    strategy, resumed = build(spec), build(spec)
    step = functools.partial(strategy.train_step, batch, LOSS)
    rates = [step().result()["actor/lr"] for _ in range(3)]
    strategy.save(tmp_path / "checkpoint")
    resumed.load(tmp_path / "checkpoint")
    expected = [step().result() for _ in range(4)]
    assert [resumed.train_step(batch, LOSS).result() for _ in range(4)] == expected
    for (name, mine), (_, other) in zip(strategy.named_weights(), resumed.named_weights(), strict=True):
        assert torch.equal(mine, other), name
    assert rates == pytest.approx([0.004, 0.007, 0.01])  # 0.1 + 0.9 * 1/3, ... of 0.01
