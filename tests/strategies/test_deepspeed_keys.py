"""Every key of DeepSpeed's JSON that is taken reaches the engine, where it acts and changes no number it shouldn't."""

from __future__ import annotations

import functools
import operator

import pytest
import torch
from layout_contract import CLIP, differences, each, layout_spec, play, put_together, reference

pytest.importorskip("deepspeed")

from roll.configs.schema.deepspeed_config import QUANTIZED_KEYS, ZERO_KEYS

SMALL = {"stage3_param_persistence_threshold": 0}
"""Without it all weights of these models would stay whole on every rank in stage 3."""


def looked(info, case):
    """What `play` returns of a role, and what stands at some places of its engine after the steps."""
    spec, places = case
    return play(info, spec, functools.partial(values_at, places))


def values_at(places, strategy):
    return [_value(operator.attrgetter(place)(strategy._engine)) for place in places]


def _value(found):
    return found() if callable(found) else found


def runs_of(ranks, world, cases):
    """Run roles that share a process group: `cases` of (spec, places to look at)."""
    return [put_together(answers) for answers in zip(*ranks.run(each, world, looked, cases), strict=True)]


def a_spec(path, options, **changes):
    return layout_spec(path, "deepspeed_train", options, **changes)


def check_numbers(run, path, name):
    wrong = {what: value for what, value in differences(run, reference(path)).items() if not value <= 1e-4}
    assert not wrong, (name, wrong)


# key -> (stage, a value that isn't the default, where the engine keeps it, what it keeps)
ZERO = {
    "contiguous_gradients": (2, False, "optimizer.contiguous_gradients", False),
    "reduce_scatter": (2, False, "optimizer.reduce_scatter", False),
    "reduce_bucket_size": (2, 1000, "optimizer.reduce_bucket_size", 1000),
    "overlap_comm": (2, True, "optimizer.overlap_comm", True),
    "use_multi_rank_bucket_allreduce": (2, False, "optimizer.use_multi_rank_bucket_allreduce", False),
    "allgather_bucket_size": (1, 1000, "optimizer.allgather_bucket_size", 1000),
    "ignore_unused_parameters": (2, False, "optimizer.ignore_unused_parameters", False),
    "parameter_alignment": (2, True, "optimizer.parameter_alignment", True),
    "sub_group_size": (3, 3000, "optimizer.sub_group_size", 3000),
    "stage3_prefetch_bucket_size": (3, 10, "zero_prefetch_bucket_size", 10),
    "stage3_param_persistence_threshold": (
        3, 40, "optimizer.parameter_offload.param_numel_persistence_threshold", 40
    ),
    "stage3_model_persistence_threshold": (
        3, 100, "optimizer.parameter_offload.model_persistence_threshold", 100
    ),
    "stage3_max_live_parameters": (3, 10, "zero_max_live_parameters", 10),
    "stage3_max_reuse_distance": (3, 0, "zero_max_reuse_distance", 0),
    "stage3_use_all_reduce_for_fetch_params": (
        3, True, "_config.zero_config.use_all_reduce_for_fetch_params", True
    ),
    "stage3_allgather_sequential": (3, True, "zero_allgather_sequential", True),
    "zero_hpz_partition_size": (3, 2, "optimizer.zero_hpz_partition_size", 2),
    "log_trace_cache_warnings": (3, True, "zero_log_trace_cache_warnings", True),
    "enable_sanity_checks": (3, True, "is_sanity_checks_enabled", True),
}  # fmt: skip
ELSEWHERE = {
    "stage": "tests of layouts", "offload_optimizer": "tests of layouts", "offload_param": "tests of layouts",
    "allgather_partitions": "refused unless it says what DeepSpeed does anyway",
    **dict.fromkeys(QUANTIZED_KEYS, "refused without an accelerator"),
}  # fmt: skip


def test_no_key_of_zero_is_forgotten_here():
    assert ZERO.keys() | ELSEWHERE.keys() == ZERO_KEYS.keys()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_keys_of_zero_reach_the_engine_and_change_no_number(ranks, model_of, stage):
    path, keys = model_of("llama"), {key: row[1:] for key, row in ZERO.items() if row[0] == stage}
    places = [place for _, place, _ in keys.values()]

    def beside(key):
        return {"stage": stage, **(SMALL if stage == 3 and key not in SMALL else {})}

    plain = [beside(None), {"stage": stage}][: 2 if stage == 3 else 1]
    given = [*plain, *({**beside(key), key: value} for key, (value, _, _) in keys.items())]
    found = runs_of(ranks, 2, [(a_spec(path, {"zero_optimization": zero}), places) for zero in given])
    for key, run in zip(keys, found[len(plain) :], strict=True):
        assert stage in ZERO_KEYS[key]
        _, place, kept = keys[key]
        default = found[plain.index(beside(key))]
        assert default.seen[places.index(place)] != kept, key
        assert run.seen[places.index(place)] == kept, key
        check_numbers(run, path, key)


@pytest.mark.parametrize("key", QUANTIZED_KEYS)
def test_quantised_exchange_reaches_the_json(key):
    from roll.configs.schema.deepspeed_config import DeepSpeedConfig
    from roll.strategies.deepspeed.deepspeed_engine import engine_json

    options = DeepSpeedConfig(zero_optimization={"stage": 3, key: True})
    spec = layout_spec("nowhere", "deepspeed_train", {"zero_optimization": options.zero_optimization})
    assert engine_json(spec, options, torch.device("cuda"))["zero_optimization"][key] is True


DIVISIONS = [
    ({"prescale_gradients": True}, "postscale_gradients", False),
    ({"gradient_predivide_factor": 4.0}, "gradient_predivide_factor", 4.0),
]


def test_when_sums_are_divided_reaches_the_engine_and_changes_no_number(ranks, model_of):
    path, cases, expected = model_of("llama"), [], []
    for zero in ({}, {"stage": 1, "reduce_scatter": False}, {"stage": 2, "reduce_scatter": False}):
        for more, place, kept in DIVISIONS:
            places = [place, f"optimizer.{place}"] if zero else [place]
            cases.append((a_spec(path, {"zero_optimization": zero, **more}), places))
            expected.append([kept] * len(places))
    found = runs_of(ranks, 2, cases)
    assert [run.seen for run in found] == expected
    for run, (spec, _) in zip(found, cases, strict=True):
        check_numbers(run, path, spec.worker.strategy_args)


def test_gradients_are_summed_over_ranks_in_the_type_asked_for(ranks, model_of):
    path = model_of("llama")
    cases = [
        (a_spec(path, {"zero_optimization": {"stage": stage}, "communication_data_type": dtype}), ())
        for stage in range(4)
        for dtype in ("bf16", "fp32")
    ]
    exact, found = reference(path).norms, runs_of(ranks, 2, cases)
    for rounded, same in zip(found[::2], found[1::2], strict=True):
        assert rounded.norms == pytest.approx(exact, rel=0.02)
        assert rounded.norms != pytest.approx(exact, rel=1e-5)
        assert same.norms == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_of_micro_batches_are_summed_in_the_type_asked_for(ranks, model_of, stage):
    zero = {"zero_optimization": {"stage": stage}}
    given = [zero, *({**zero, "data_types": {"grad_accum_dtype": dtype}} for dtype in ("fp32", "bf16"))]
    specs = [a_spec(model_of("llama"), options, model={"dtype": "bf16"}) for options in given]
    by_default, fp32, bf16 = (run.norms for run in runs_of(ranks, 1, [(spec, ()) for spec in specs]))
    assert by_default == fp32
    assert bf16 != fp32
    assert bf16 == pytest.approx(fp32, rel=0.02)


def test_immediate_updates_of_bf16_gradients_reach_stage_1_and_change_no_number(ranks, model_of):
    zero = {"zero_optimization": {"stage": 1}}
    specs = [
        a_spec(model_of("llama"), {**zero, **more}, model={"dtype": "bf16"})
        for more in ({}, {"bf16": {"immediate_grad_update": True}})
    ]
    late, at_once = runs_of(ranks, 2, [(spec, ["optimizer.immediate_grad_update"]) for spec in specs])
    assert (late.seen, at_once.seen) == ([False], [True])
    assert late.norms == at_once.norms


def test_clipping_and_sizes_are_filled_in_from_the_role(ranks, model_of):
    zero = {"zero_optimization": {"stage": 2}}
    specs = [
        a_spec(model_of("llama"), {**zero, **more})
        for more in ({}, {"gradient_clipping": "auto", "train_batch_size": "auto"})
    ]
    for run in runs_of(ranks, 2, [(spec, ["optimizer.clip_grad"]) for spec in specs]):
        assert run.seen == [CLIP]
        assert run.norms[0] > CLIP
