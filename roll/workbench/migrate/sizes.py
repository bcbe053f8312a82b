"""Slots and ranks of the roles of a draft, as far as they are known."""

from __future__ import annotations

import math

from roll.configs.schema.placement_plan import parse_device_mapping
from roll.workbench.migrate.draft import Draft


def slots_of(draft: Draft, role: str) -> tuple[int, ...]:
    """Return the slots of a role; empty where they aren't given, or are no slots."""
    given = draft.get(f"{role}.device_mapping")
    try:
        return parse_device_mapping(given) if given is not None else ()
    except (ValueError, TypeError):
        return ()


def data_parallel(draft: Draft, role: str) -> int:
    """Return the ranks of a role that work on different rows, as far as they are known."""
    ranks = len(slots_of(draft, role)) or draft.get(f"{role}.world_size") or 1
    options = draft.get(f"{role}.strategy_args.strategy_config", {})
    sizes = [draft.get(f"{role}.model_args.{key}", 1) for key in ("ulysses_size", "ring_attention_size")]
    if draft.strategies.get(role, "").startswith("megatron") and isinstance(options, dict):
        sizes += [options.get(f"{key}_parallel_size", 1) for key in ("tensor_model", "pipeline_model", "context")]
    together = math.prod(size for size in sizes if isinstance(size, int))
    return max(1, ranks // max(1, together)) if isinstance(ranks, int) else 1


def say_curves(draft: Draft, whose: str) -> None:
    """Say in what the start differs, which no key changes."""
    decisions = draft.report.decisions
    for role in ("actor_train", "critic"):
        args = f"{role}.training_args"
        if draft.get(f"{args}.warmup_steps") or draft.get(f"{args}.warmup_ratio"):
            decisions.append(
                f"{args}: a warm-up of w steps rises from 1 / (w + 1) of the peak here, and in {whose} from 0, so that "
                "its first update changes nothing" + ("; a share is rounded up here, down in verl" * (whose == "verl"))
            )
    if draft.has("critic"):
        decisions.append(f"critic: the head for values starts at 0, in {whose} at random")
