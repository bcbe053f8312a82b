"""Every accepted option of FSDP2 and of DeepSpeed's `zero_optimization` on two ranks, in every order of calls.

The options are read off the schema: a new one is played too, or fails here until somebody says which values it has.
"""

from __future__ import annotations

import itertools
import json
import typing
from dataclasses import fields

import pytest
from layout_contract import layout_spec
from rank_orders import ORDERS, differences, first_other, play_and_resume, play_order, undisturbed
from ranks import RankPool
from tiny_models import build_tiny_model

from roll.configs.rules.deepspeed_rules import COUNTS
from roll.configs.schema.deepspeed_config import OFFLOAD_KEYS, QUANTIZED_KEYS, ZERO_KEYS
from roll.configs.schema.strategy_config import Fsdp2Config

TRAINING = {"per_device_train_batch_size": 1}
FP32 = 1e-6
HALF = 0.05
"""Of log-probs, norms and weights where something is computed or summed in half precision."""
NUMBERS = {"fsdp_size": (1, 2)}
"""Values of FSDP2's options that are neither switches nor choices."""
COUNT_VALUES = {"zero_hpz_partition_size": (2,)}
ANY_COUNT = (10, 3000)
SHARED = {"stage3_param_persistence_threshold": 0}
"""Without it all weights of the tiny model stay whole on every rank in stage 3."""


def fsdp2_options() -> list[dict]:
    """Every value of every option, and all combinations of those that decide when weights are gathered."""
    hints = typing.get_type_hints(Fsdp2Config)
    values = {}
    for field in fields(Fsdp2Config):
        if True in (field.metadata.get("accelerator") or {}):
            continue  # refused without one
        kinds = [hints[field.name], *typing.get_args(hints[field.name])]
        choices = [c for kind in kinds if typing.get_origin(kind) is typing.Literal for c in typing.get_args(kind)]
        if bool in kinds:
            choices = [True, False]
        values[field.name] = [c for c in choices or NUMBERS[field.name] if c not in (field.default, "fp16")]
    single = [{name: value} for name, those in values.items() for value in those]
    off = ({}, {"reshard_after_forward": False}, {"shard_between_micro_batches": False})
    off += ({"reshard_after_forward": False, "shard_between_micro_batches": False},)
    more = ({}, {"fsdp_size": 1}, {"param_dtype": "bf16"})
    return _unique([*single, *({**one, **other} for one, other in itertools.product(more, off))])


def zero_options() -> list[dict]:
    """Every sub-key in every stage in which it acts, with every value that isn't DeepSpeed's own."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    own = {f.alias or name: f.default for name, f in DeepSpeedZeroConfig.model_fields.items()}
    found = [{"stage": stage, **(SHARED if stage == 3 else {})} for stage in ZERO_KEYS["stage"]]
    for key, stages in ZERO_KEYS.items():
        if key in QUANTIZED_KEYS or key == "stage":
            continue
        values = [True, False]
        if key in COUNTS:
            values = list(COUNT_VALUES.get(key, ANY_COUNT))
        elif key in OFFLOAD_KEYS:
            values = [{"device": "cpu"}, {"device": "cpu", "pin_memory": True}]
        elif key == "allgather_partitions":
            values = [True]  # the other is refused
        for stage, value in itertools.product(stages, values):
            if value != own[key]:
                found.append({"stage": stage, **(SHARED if stage == 3 else {}), key: value})
    host = {"device": "cpu"}
    found.append({"stage": 3, **SHARED, "offload_optimizer": {**host, "ratio": 0.5}})
    found.append({"stage": 3, **SHARED, "offload_optimizer": host, "offload_param": host})
    found += [{"stage": 3}, {"stage": 3, "zero_hpz_partition_size": 2}]
    return _unique(found)


def _unique(options: list[dict]) -> list[dict]:
    return [json.loads(text) for text in dict.fromkeys(json.dumps(each, sort_keys=True) for each in options)]


def test_every_key_that_is_accepted_is_played():
    played = {key for options in zero_options() for key in options}
    # Refused without an accelerator; and one that must say what DeepSpeed does anyway.
    assert ZERO_KEYS.keys() - played == {*QUANTIZED_KEYS, "allgather_partitions"}
    assert {key for options in fsdp2_options() for key in options} | {"offload_policy", "param_offload",
            "optimizer_offload"} == {field.name for field in fields(Fsdp2Config)}  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """`alone(order, model)`: what one rank without a process group gives."""
    pool, path = RankPool(), build_tiny_model(tmp_path_factory.mktemp("orders") / "model", "llama")
    played = {}

    def of(order, model):
        key = (order, json.dumps(model))
        if key not in played:
            spec = layout_spec(path, "fsdp2_train", {}, training=TRAINING, model=dict(model))
            folder = tmp_path_factory.mktemp("alone")
            played[key] = pool.run(play_order, 1, spec, folder, undisturbed(ORDERS[order]))[0]
        return played[key]

    of.path = path
    yield of
    pool.close()


CASES = [
    *(("fsdp2_train", options) for options in fsdp2_options()),
    *(("deepspeed_train", {"zero_optimization": zero}) for zero in zero_options()),
]
MODELS = {"fp32": {}, "lora": {"lora_rank": 2}}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("strategy", "options"), CASES, ids=lambda value: json.dumps(value) if isinstance(value, dict) else value
)
def test_two_ranks_equal_one_in_every_order(ranks, alone, tmp_path, evidence_folder, strategy, options, model, order):
    spec = layout_spec(alone.path, strategy, options, training=TRAINING, model=dict(MODELS[model]))
    played = ranks.run(play_and_resume, 2, [spec], tmp_path, ORDERS[order])
    wholes = [of_rank[0][0] for of_rank in played]
    found = differences(wholes, alone(order, MODELS[model]))
    others = [first_other(of_rank[0][1], of_rank[0][0]) for of_rank in played]
    row = {"strategy": strategy, **options, "model": model, "order": order, **found, "resumed": others}
    with open(evidence_folder / "orders.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    limit = HALF if "bf16" in options.values() else FP32
    assert max(found.values()) <= limit, found
    assert others == [None, None]
