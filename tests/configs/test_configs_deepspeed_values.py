"""Values in DeepSpeed's JSON are checked before anything starts."""

from __future__ import annotations

import pytest
import yaml

from roll.configs.errors import ConfigError
from roll.configs.parsing.loader import load_config
from roll.configs.rules.deepspeed_rules import COUNTS

ZERO = "actor_train.strategy_args.strategy_config.zero_optimization"


def use(job, zero):
    tree = yaml.safe_load((job / "job.yaml").read_text())
    strategy = {"strategy_name": "deepspeed_train", "strategy_config": {"zero_optimization": zero}}
    tree.setdefault("actor_train", {})["strategy_args"] = strategy
    (job / "job.yaml").write_text(yaml.safe_dump(tree))
    return load_config(job, "job", [])


@pytest.mark.parametrize(
    ("zero", "key", "text"),
    [
        ({"stage": 2.0}, "stage", "write 2"),
        ({"stage": 2, "reduce_bucket_size": "many"}, "reduce_bucket_size", "a whole number >= 1"),
        ({"stage": 2, "reduce_bucket_size": 0}, "reduce_bucket_size", "a whole number >= 1"),
        ({"stage": 3, "stage3_max_live_parameters": -1}, "stage3_max_live_parameters", "a whole number >= 0"),
        ({"stage": 3, "sub_group_size": 1.5}, "sub_group_size", "a whole number >= 0"),
        ({"stage": 2, "overlap_comm": "perhaps"}, "overlap_comm", "true or false"),
        ({"stage": 2, "overlap_comm": 1}, "overlap_comm", "true or false"),
        ({"stage": 3, "zero_hpz_partition_size": 8}, "zero_hpz_partition_size", "a divisor of the 1 rank(s)"),
        ({"stage": 3, "offload_param": {"device": "cpu", "pin_memory": 3}}, "offload_param.pin_memory",
         "true or false"),
        ({"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 2}}, "offload_optimizer.ratio",
         "a number from 0 to 1"),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_kind_is_one_error_that_names_its_key(job, zero, key, text):
    with pytest.raises(ConfigError) as caught:
        use(job, zero)
    (violation,) = caught.value.violations
    assert violation.path == f"{ZERO}.{key}"
    assert text in str(violation)


def test_whole_numbers_in_scientific_notation_and_auto_pass(job):
    use(job, {"stage": 3, "reduce_bucket_size": 5e8, "stage3_prefetch_bucket_size": "auto", "overlap_comm": "auto"})


def test_numbers_and_switches_are_those_of_deepspeed():
    config = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig
    kinds = {field.alias or name: field.annotation for name, field in config.model_fields.items()}
    assert {name for name, kind in kinds.items() if kind is int} - COUNTS <= {"stage3_module_granularity_threshold"}
    assert all(kinds[name] is int for name in COUNTS)
