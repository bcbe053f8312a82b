"""Verifiers that execute the answer: a run that has one needs a sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.configs.checks.sandbox_checks import sandboxed_domains
from roll.configs.parsing.loader import load_config
from roll.configs.schema.rlvr_config import RLVRConfig

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"


def domains(*overrides: str) -> tuple[str, ...]:
    config = load_config(QUICKSTART, "rlvr_smollm2", list(overrides))
    assert isinstance(config, RLVRConfig)
    return sandboxed_domains(config)


def test_the_quickstart_needs_no_sandbox() -> None:
    assert domains() == ()


@pytest.mark.parametrize(
    ("dataset", "config"),
    [("countdown", "{}"), ("n_queens", "{}"), ("composite", "{datasets: [{name: binary_matrix}]}")],
)
@pytest.mark.parametrize("name", ["reasoning_gym", "roll.rewards.reasoning_gym:reasoning_gym"])
def test_a_domain_with_such_a_verifier_needs_one(dataset: str, config: str, name: str) -> None:
    first = f"{{tag: products, dataset: {dataset}, size: 1, config: {config}}}"
    tasks = f"[{first}, {{tag: chain_sum, dataset: chain_sum, size: 1}}]"
    rewards = [f"rewards.products.name='{name}'", f"rewards.sums.name='{name}'"]
    assert domains(f"actor_train.data_args.procedural={tasks}", *rewards) == ("products",)
    # In validation alone, too.
    assert domains(f"validation.data_args.procedural={tasks}", *rewards) == ("products",)


def test_code_needs_one() -> None:
    assert domains("rewards.sums={name: code, tag_included: chain_sum}") == ("sums",)
