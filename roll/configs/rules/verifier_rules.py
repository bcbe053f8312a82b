"""Verifiers of reasoning-gym that run the model's text as code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

VERIFIERS_THAT_EXECUTE = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
"""Datasets whose `score_answer` calls `eval`, or sympy's `parse_expr` (an `eval` too), on the response."""

WHY_SANDBOXED = (
    "its verifier executes the response as Python code (eval, or sympy's parser), so the model could run anything on "
    "this machine; it needs a sandbox"
)
WHAT_TO_DO = "give the reward the parameter `sandbox`, as a run does, or use another dataset"


def verifier_that_executes(dataset: str, options: Mapping[str, Any]) -> str | None:
    """Return the dataset of `VERIFIERS_THAT_EXECUTE` that scores the answers of `dataset`, or None.

    A `composite` scores with the datasets that its options name, at any depth.
    """
    if dataset in VERIFIERS_THAT_EXECUTE:
        return dataset
    if dataset == "composite":
        return next((text for text in _texts(options) if text in VERIFIERS_THAT_EXECUTE), None)
    return None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)
    elif is_dataclass(value):  # a specification of the library's own
        yield from _texts(vars(value))
