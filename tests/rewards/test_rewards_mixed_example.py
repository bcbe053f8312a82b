"""The tasks of examples/mixed: each domain's reward gives full marks to the solution of the warm start."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from roll.rewards.choice import choice
from roll.rewards.ifeval import ifeval
from roll.rewards.math_rule import math_rule
from roll.types.trajectory import Task

FILE = Path(__file__).parents[2] / "examples" / "mixed" / "mixed_tasks.py"
REWARDS = {"maths": math_rule, "instructions": ifeval, "choice": choice}


@pytest.fixture
def mixed(monkeypatch) -> Any:
    """The example's file, which looks for others beside it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("mixed_tasks", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("tag", list(REWARDS))
def test_a_solution_gets_full_marks_and_the_next_tasks_does_not_always(mixed, tag):
    made = mixed.make_tasks(tag, 30, seed=3, without=set())
    solutions = [task["solution"] for task in made]
    assert scores(made, solutions) == [1.0] * len(made)
    assert sum(scores(made, solutions[1:] + solutions[:1])) < len(made)


def scores(made: list[dict[str, str]], texts: list[str]) -> list[float]:
    """What the domain's reward gives these texts."""
    found = []
    for i, (row, text) in enumerate(zip(made, texts, strict=True)):
        tag = row["tag"]
        payload = {key: row[key] for key in ("prompt", "ground_truth", "tag")}
        task = Task(id=str(i), source="mixed", payload=payload, seed=i, tag=tag, domain=tag)
        found.append(REWARDS[tag](text, task).value)
    return found


def test_tasks_follow_from_their_seed_and_leave_out_what_is_held_out(mixed):
    for tag in mixed.DOMAINS:
        held_out = mixed.make_tasks(tag, 20, seed=0, without=set())
        without = {task["prompt"] for task in held_out}
        tasks = mixed.make_tasks(tag, 100, seed=2, without=without)
        assert not without & {task["prompt"] for task in tasks}
        assert tasks == mixed.make_tasks(tag, 100, seed=2, without=without)
        assert {task["tag"] for task in tasks} == {tag}


def test_a_sum_is_never_longer_than_the_model_counts(mixed):
    rng = random.Random(0)
    assert max(int(mixed.maths(rng)["ground_truth"]) for _ in range(500)) <= 40
