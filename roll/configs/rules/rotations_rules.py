"""Which engines compute the rotary embeddings of a run's rows as its trainer does: one set of factors for all rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def rotation_obstacle(engine: str, tree: Mapping[str, Any], longest: int, max_model_len: int | None = None) -> str:
    """Return why an engine would sample with other frequencies than the trainer scores with; empty: it wouldn't.

    `tree`: the model's configuration; `longest`: tokens of the run's longest row, by which the trainer chooses.
    `hf_infer` chooses as the trainer does, and so does vLLM by its `max_model_len`.
    """
    for rope in _rotations(tree):
        kind = rope.get("rope_type", rope.get("type"))
        if engine == "sglang" and kind == "dynamic" and "alpha" not in rope and rope.get("factor", 1.0) != 1.0:
            return (
                "its rotary embedding is of type dynamic, which SGLang stretches for rows of any length and "
                "transformers, with which it is trained, only beyond the model's own length"
            )
        limit = tree.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
        if kind not in ("longrope", "su") or type(limit) is not int:
            continue
        if engine == "sglang" and longest > limit:
            return (
                f"its rotary embedding is of type longrope, and SGLang chooses its factors by the longest row of each "
                f"batch, while rows of this run may pass {limit} tokens: all have to be computed with one set"
            )
        held = max_model_len or longest
        if engine == "vllm" and (held > limit) != (longest > limit):
            return (
                f"its rotary embedding is of type longrope, and vLLM chooses its factors by max_model_len ({held}), "
                f"the trainer by the longest row of the run ({longest}): both have to be above {limit}, or neither"
            )
    return ""


def _rotations(tree: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters of every rotary embedding that a configuration names, in transformers' old form or new."""
    for key in ("rope_parameters", "rope_scaling"):
        value = tree.get(key)
        if isinstance(value, Mapping):
            yield value
            yield from (part for part in value.values() if isinstance(part, Mapping))
