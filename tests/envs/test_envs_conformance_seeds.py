"""Conformance: what a seed decides, over the seeds that runs use, and what else decides something."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from roll.envs.base import Env, InvalidAction, Observation, StepResult
from roll.envs.conformance import Finding, check_env


class Walk(Env):
    """Three steps along a line that the seed draws, then cut off. Good as it is; the classes below break a promise."""

    actions = ("Left", "Right")

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        self.rng = random.Random(seed)
        self.steps = 0
        return Observation.of(f"at {self.rng.randrange(10**6)}")

    def step(self, action: str) -> StepResult:
        if action not in self.actions:
            raise InvalidAction("Left or Right?")
        self.steps += 1
        return StepResult(
            reward=self.rng.random(),
            terminated=False,
            truncated=self.steps == 3,
            observation=Observation.of(f"at {self.rng.randrange(10**6)}"),
        )


class IgnoresItsSeed(Walk):
    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        return super().reset(7, options)


class NeedsSmallSeeds(Walk):
    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        return super().reset(int(np.random.RandomState(seed).randint(10**6)), options)


def findings(make: Any, **arguments: Any) -> list[Finding]:
    return check_env(make, **{"seeds": 4, "max_steps": 12, **arguments})


def of_level(found: list[Finding], *levels: str) -> dict[str, str]:
    return {finding.check: finding.message for finding in found if finding.level in levels}


def test_a_wrapper_that_ignores_its_seed_fails():
    assert "seeds differ" in of_level(findings(lambda: IgnoresItsSeed()), "error")


def test_one_that_needs_32_bit_seeds_fails_and_is_told_so():
    said = of_level(findings(lambda: NeedsSmallSeeds()), "error")
    assert "seeds of at most 32 bits" in said["63-bit seeds"]


def test_a_right_one_with_a_time_limit_of_its_own_gets_no_warning():
    found = findings(lambda: Walk())
    assert of_level(found, "warning", "error") == {}
    assert not [f for f in found if "no episode ended" in f.message]
