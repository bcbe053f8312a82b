"""Environments: values of `custom_envs.<tag>.env_type`."""

from __future__ import annotations

from roll.catalog.entries import Entry

ENVS: dict[str, Entry] = {
    "sokoban-v1": Entry(path="roll.envs.sokoban:Sokoban"),
    "frozen_lake-v1": Entry(path="roll.envs.frozen_lake:FrozenLake"),
    "countdown-v1": Entry(path="roll.envs.countdown:Countdown"),
    "question_answer-v1": Entry(path="roll.envs.question_answer:QuestionAnswer"),
}
"""Classes of `roll.envs.base.Env` by id. A change that alters what a seed plays bumps the version."""
