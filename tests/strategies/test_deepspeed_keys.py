"""Every key of DeepSpeed's JSON that is taken reaches the engine, where it acts and changes no number it shouldn't."""

from __future__ import annotations

import functools
import operator

import pytest
import torch
from layout_contract import check_layout, layout_spec, reference, run_layout

pytest.importorskip("deepspeed")

from roll.configs.schema.deepspeed_config import QUANTIZED_KEYS, ZERO_KEYS

SMALL = {"stage3_param_persistence_threshold": 0}
"""Without it all weights of these models would stay whole on every rank in stage 3."""


def look_at(*places):
    """For `run_layout`: what stands at each of these places of the engine after the steps."""
    return functools.partial(values_at, places)


def values_at(places, strategy):
    return [_value(operator.attrgetter(place)(strategy._engine)) for place in places]


def _value(found):
    return found() if callable(found) else found


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


@pytest.fixture(scope="module")
def defaults(ranks, model_of):
    """`defaults(zero)`: what an engine of these options has at all places of its stage, by place; asked once each."""
    found = {}

    def of(zero):
        if repr(zero) not in found:
            places = [place for stage, _, place, _ in ZERO.values() if stage == zero["stage"]]
            spec = layout_spec(model_of("llama"), "deepspeed_train", {"zero_optimization": zero})
            found[repr(zero)] = dict(zip(places, run_layout(ranks, spec, 2, look_at(*places)).seen, strict=True))
        return found[repr(zero)]

    return of


@pytest.mark.parametrize("key", ZERO)
def test_keys_of_zero_reach_the_engine_and_change_no_number(ranks, model_of, defaults, key):
    stage, value, place, kept = ZERO[key]
    assert stage in ZERO_KEYS[key]
    zero = {"stage": stage, **(SMALL if stage == 3 and key not in SMALL else {})}
    assert defaults(zero)[place] != kept
    options = {"zero_optimization": {**zero, key: value}}
    assert check_layout(ranks, model_of("llama"), "deepspeed_train", options, 2, look=look_at(place)).seen == [kept]


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


@pytest.mark.parametrize("zero", [{}, {"stage": 1, "reduce_scatter": False}, {"stage": 2, "reduce_scatter": False}])
@pytest.mark.parametrize(("more", "place", "kept"), DIVISIONS)
def test_when_sums_are_divided_reaches_the_engine_and_changes_no_number(ranks, model_of, zero, more, place, kept):
    options, places = {"zero_optimization": zero, **more}, [place, f"optimizer.{place}"] if zero else [place]
    run = check_layout(ranks, model_of("llama"), "deepspeed_train", options, 2, look=look_at(*places))
    assert run.seen == [kept] * len(places)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_are_summed_over_ranks_in_the_type_asked_for(ranks, model_of, stage):
    exact = reference(model_of("llama")).norms
    zero = {"zero_optimization": {"stage": stage}}
    spec = layout_spec(model_of("llama"), "deepspeed_train", {**zero, "communication_data_type": "bf16"})
    rounded = run_layout(ranks, spec, 2).norms
    assert rounded == pytest.approx(exact, rel=0.02)
    assert rounded != pytest.approx(exact, rel=1e-5)
    same = layout_spec(model_of("llama"), "deepspeed_train", {**zero, "communication_data_type": "fp32"})
    assert run_layout(ranks, same, 2).norms == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_of_micro_batches_are_summed_in_the_type_asked_for(ranks, model_of, stage):
    norms = {}
    for given in (None, "fp32", "bf16"):
        options = {"zero_optimization": {"stage": stage}}
        if given:
            options["data_types"] = {"grad_accum_dtype": given}
        spec = layout_spec(model_of("llama"), "deepspeed_train", options, model={"dtype": "bf16"})
        norms[given] = run_layout(ranks, spec, 1).norms
    assert norms[None] == norms["fp32"]
    assert norms["bf16"] != norms["fp32"]
    assert norms["bf16"] == pytest.approx(norms["fp32"], rel=0.02)


def test_immediate_updates_of_bf16_gradients_reach_stage_1_and_change_no_number(ranks, model_of):
    norms = []
    for more in ({}, {"bf16": {"immediate_grad_update": True}}):
        options = {"zero_optimization": {"stage": 1}, **more}
        spec = layout_spec(model_of("llama"), "deepspeed_train", options, model={"dtype": "bf16"})
        run = run_layout(ranks, spec, 2, look_at("optimizer.immediate_grad_update"))
        norms.append(run.norms)
        assert run.seen == [bool(more)]
    assert norms[0] == norms[1]


def test_clipping_and_sizes_are_filled_in_from_the_role(ranks, model_of):
    for options in ({}, {"gradient_clipping": "auto", "train_batch_size": "auto"}):
        spec = layout_spec(model_of("llama"), "deepspeed_train", {"zero_optimization": {"stage": 2}, **options})
        run = run_layout(ranks, spec, 2, look_at("optimizer.clip_grad"))
        assert run.seen == [spec.max_grad_norm]
        assert spec.max_grad_norm < run.norms[0]
