"""Reward functions: values of `rewards.<domain>.name`."""

from __future__ import annotations

from roll.configs.catalog.entries import Entry

REWARDS: dict[str, Entry] = {
    "math_rule": Entry(path="roll.rewards.math_rule:math_rule"),
    "gsm8k": Entry(path="roll.rewards.gsm8k:gsm8k"),
    "reasoning_gym": Entry(path="roll.rewards.reasoning_gym:reasoning_gym"),
    "code": Entry(path="roll.rewards.code:code", answers=False, sandboxed=True),
    "ifeval": Entry(path="roll.rewards.ifeval:ifeval", answers=False),
    "choice": Entry(path="roll.rewards.choice:choice"),
    "exact": Entry(path="roll.rewards.exact:exact"),
    "regex": Entry(path="roll.rewards.format:regex"),
    "format": Entry(path="roll.rewards.format:format", answers=False),
    "length": Entry(path="roll.rewards.length:length", answers=False),
    "repetition": Entry(path="roll.rewards.repetition:repetition", answers=False),
    "http": Entry(path="roll.rewards.http:http"),
    "none": Entry(path="roll.rewards.none:none", answers=False),
    "weighted": Entry(path="roll.rewards.weighted:weighted"),
}
"""`(response, task, **reward_kwargs) -> Reward | float`; a new one is a file and a line here."""
