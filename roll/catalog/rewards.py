"""Reward functions: values of `rewards.<domain>.name`."""

from __future__ import annotations

from roll.catalog.entries import Entry

REWARDS: dict[str, Entry] = {
    "math_rule": Entry(path="roll.rewards.math_rule:math_rule"),
    "gsm8k": Entry(path="roll.rewards.gsm8k:gsm8k"),
    "ifeval": Entry(path="roll.rewards.ifeval:ifeval"),
    "reasoning_gym": Entry(path="roll.rewards.reasoning_gym:reasoning_gym"),
}
"""`(response, task, **reward_kwargs) -> Reward | float`; a new one is a file and a line here."""
