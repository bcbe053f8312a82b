"""Tiny programming tasks, and a random model for their words: `prepare` of sft_tiny_programs.yaml.

A task describes a function in words ("x , add 3 , times 5"), and its tests are calls with their results. Makes, unless
they are there: rows with solutions for the warm start, tasks for training, other tasks for validation, and the model.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from roll.configs.schema.sft_config import SFTConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
from small_agents import make_model, write

SOLVED, TRAINING, HELD_OUT = 600, 2_000, 200
STEPS = (1, 2, 3)
ARGUMENTS = (0, 1, 2, 3, 5, 7)


def prepare(config: SFTConfig) -> None:
    """Write the files and the model. Everything follows from the seed, but the validation tasks are always the same."""
    (solved,) = map(Path, config.actor_train.data_args.file_name)
    folder, model = solved.parent, Path(config.pretrain or "")
    if solved.is_file() and (model / "config.json").is_file():
        return
    held_out = make_tasks(HELD_OUT, seed=0, without=set())
    without = {task["prompt"] for task in held_out}
    tasks = make_tasks(SOLVED + TRAINING, seed=1 + config.seed, without=without)
    write(folder / "held_out.jsonl", [tests_only(task) for task in held_out])
    write(folder / "tasks.jsonl", [tests_only(task) for task in tasks[SOLVED:]])
    write(solved, [solution(task) for task in tasks[:SOLVED]])
    make_model(model, [task["prompt"] + " " + task["program"] for task in [*tasks, *held_out]], config.seed)


def make_tasks(count: int, *, seed: int, without: set[str]) -> list[dict[str, Any]]:
    """Make tasks with different descriptions."""
    rng, taken = random.Random(seed), set(without)
    tasks: list[dict[str, Any]] = []
    while len(tasks) < count:
        task = make_task(rng)
        if task["prompt"] not in taken:
            taken.add(task["prompt"])
            tasks.append(task)
    return tasks


def make_task(rng: random.Random) -> dict[str, Any]:
    """Make one task: what to do with x in some steps, a program that does it, and its results."""
    words, expression, sums = ["x"], "x", False
    for _ in range(rng.choice(STEPS)):
        kind, n = rng.choice(("add", "minus", "times", "from")), rng.randint(2, 9)
        inner = f"( {expression} )" if sums and kind in ("times", "from") else expression
        words.append(f"{kind} {n}")
        expression = {"add": f"{expression} + {n}", "minus": f"{expression} - {n}", "times": f"{inner} * {n}",
                      "from": f"{n} - {inner}"}[kind]  # fmt: skip
        sums = kind != "times"
    results = [eval(expression, {"x": x}) for x in ARGUMENTS]
    return {
        "prompt": " , ".join(words),
        "program": f"def f ( x ) : return {expression}",
        "ground_truth": json.dumps({"fn_name": "f", "inputs": [[x] for x in ARGUMENTS], "outputs": results}),
    }


def tests_only(task: dict[str, Any]) -> dict[str, Any]:
    """Return a row of `pipeline: rlvr`."""
    return {"prompt": task["prompt"], "ground_truth": task["ground_truth"], "tag": "tiny_programs"}


def solution(task: dict[str, Any]) -> dict[str, Any]:
    """Return a row of `pipeline: sft`."""
    texts = (("user", task["prompt"]), ("assistant", task["program"]))
    return {"messages": [{"role": role, "content": content} for role, content in texts]}
