"""Rules about the values in DeepSpeed's `zero_optimization`, which its own reader would only check in every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from roll.configs.errors import Violation
from roll.configs.schema.deepspeed_config import OFFLOAD_KEYS, ZERO_KEYS, DeepSpeedConfig
from roll.configs.schema.run_config import RunConfig

COUNTS = frozenset(
    {
        "reduce_bucket_size",
        "allgather_bucket_size",
        "sub_group_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "zero_hpz_partition_size",
    }
)
"""Keys of `zero_optimization` that are numbers; those that are neither these, `stage` nor sections are switches."""


def deepspeed_value_rules(config: RunConfig) -> Iterator[Violation]:
    """Types and bounds; DeepSpeed takes `auto` for its default."""
    for role, worker in config.sections.items():
        if not isinstance(worker.strategy_args.strategy_config, DeepSpeedConfig):
            continue
        path = f"{role}.strategy_args.strategy_config.zero_optimization"
        given = worker.strategy_args.strategy_config.zero_optimization
        yield from _values(path, given)
        group = given.get("zero_hpz_partition_size", 1)
        if _is_count(group) and group > 1 and worker.ranks % group:
            expected = f"a divisor of the {worker.ranks} rank(s) of {role}, whose weights such a group keeps whole"
            yield Violation(f"{path}.zero_hpz_partition_size", expected, "1 or remove it", group)


def _values(path: str, given: Mapping[str, Any]) -> Iterator[Violation]:
    for key, value in given.items():
        if key == "stage":
            if isinstance(value, float) and value.is_integer():
                yield Violation(f"{path}.stage", "a whole number", f"write {value:.0f}", value)
        elif key in COUNTS:
            least = 1 if key == "reduce_bucket_size" else 0
            if value != "auto" and not (_is_count(value) and value >= least):
                yield Violation(f"{path}.{key}", f"a whole number >= {least}, or auto", "", value)
        elif key in OFFLOAD_KEYS:
            if isinstance(value, Mapping):
                yield from _offload(f"{path}.{key}", value)
        elif key in ZERO_KEYS and value != "auto" and not isinstance(value, bool):
            yield Violation(f"{path}.{key}", "true or false, or auto", "", value)


def _offload(path: str, section: Mapping[str, Any]) -> Iterator[Violation]:
    if not isinstance(section.get("pin_memory", False), bool):
        yield Violation(f"{path}.pin_memory", "true or false", "", section["pin_memory"])
    ratio = section.get("ratio", 1.0)
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
        yield Violation(f"{path}.ratio", "a number from 0 to 1", "", ratio)


def _is_count(value: Any) -> bool:
    """Whole, also as 5e8, which YAML reads as a fraction."""
    return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))
