"""Tasks of four domains in one file, and a random model for their words: `prepare` of sft_mixed.yaml.

Makes, unless they are there: rows with solutions for the warm start, tasks for training, other tasks for validation,
and the model. A row has a prompt, a tag, which decides on its reward, and what that reward compares with.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from roll.configs.schema.sft_config import SFTConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "code"))
import tiny_programs
from small_agents import make_model, write

SOLVED, TRAINING, HELD_OUT = 300, 400, 50
"""Tasks of each domain, but of `maths` there are fewer: see `SUMS`."""
SUMS = 31 * 10
"""All sums of a number up to 30 and one up to 9."""
NOUNS = ("bird", "bridge", "cat", "dog", "garden", "house", "river", "tree")
VERBS = ("rests", "sits", "sleeps", "stays", "waits")
ENDINGS = ("that is all", "thank you", "the end")


def maths(rng: random.Random) -> dict[str, str]:
    """Return `12 + 7`."""
    a, b = rng.randint(0, 30), rng.randint(0, 9)
    return {"prompt": f"{a} + {b}", "ground_truth": str(a + b), "solution": str(a + b)}


def code(rng: random.Random) -> dict[str, str]:
    """Return a task of examples/code: `x , add 3 , times 5`."""
    task = tiny_programs.make_task(rng)
    return {"prompt": task["prompt"], "ground_truth": task["ground_truth"], "solution": task["program"]}


def instructions(rng: random.Random) -> dict[str, str]:
    """Return two or three constraints in words, and as the ids and keyword arguments that `ifeval` reads."""
    keyword, ending, many = rng.choice(NOUNS), rng.choice(ENDINGS), rng.random() < 0.5
    length = rng.randint(9, 12) if many else rng.randint(10, 13)
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "in lower case": ("change_case:english_lowercase", {}),
        "without a comma": ("punctuation:no_comma", {}),
        f"mention the {keyword}": ("keywords:existence", {"keywords": [keyword]}),
        f"at least {length} words" if many else f"less than {length} words": (
            "length_constraints:number_words",
            {"num_words": length, "relation": "at least" if many else "less than"},
        ),
        f"end with {ending}": ("startend:end_checker", {"end_phrase": ending}),
    }
    chosen = rng.sample(list(asked), rng.choice((2, 3)))
    ids = [asked[words][0] for words in chosen]
    keep = {"instruction_id_list": ids, "kwargs": [asked[words][1] for words in chosen]}
    return {
        "prompt": "write : " + " ; ".join(chosen),
        "ground_truth": json.dumps(keep),
        "solution": sentence(rng, set(ids), keyword, ending, many),
    }


def sentence(rng: random.Random, ids: set[str], keyword: str, ending: str, many: bool) -> str:
    """Return a text that keeps these constraints, and breaks the others where that is easy."""
    nouns = rng.sample([noun for noun in NOUNS if noun != keyword], 3)
    if "keywords:existence" in ids:
        nouns[rng.randrange(2)] = keyword
    text = f"the {nouns[0]} {rng.choice(VERBS)} near the {nouns[1]}"
    long = many if "length_constraints:number_words" in ids else rng.random() < 0.5
    if long:
        comma = "" if "punctuation:no_comma" in ids else " ,"
        text += f"{comma} and the {nouns[2]} {rng.choice(VERBS)} with the other animals"
    if "change_case:english_lowercase" not in ids:
        text = text.replace("the", "The", 1)
    return f"{text} {ending}" if "startend:end_checker" in ids else text


def choice(rng: random.Random) -> dict[str, str]:
    """Return `which is larger ? ( A ) 3 ( B ) 8 ( C ) 5`."""
    numbers, asked = rng.sample(range(21), 3), rng.choice(("larger", "smaller"))
    best = numbers.index(max(numbers) if asked == "larger" else min(numbers))
    options = " ".join(f"( {letter} ) {number}" for letter, number in zip("ABC", numbers, strict=True))
    return {
        "prompt": f"which is {asked} ? {options}",
        "ground_truth": "ABC"[best],
        "solution": f"the answer is {'ABC'[best]}",
    }


DOMAINS: dict[str, Callable[[random.Random], dict[str, str]]] = {
    "maths": maths,
    "code": code,
    "instructions": instructions,
    "choice": choice,
}


def prepare(config: SFTConfig) -> None:
    """Write the files and the model. Everything follows from the seed, but the validation tasks are always the same."""
    (solved,) = map(Path, config.actor_train.data_args.file_name)
    folder, model = solved.parent, Path(config.pretrain or "")
    if solved.is_file() and (model / "config.json").is_file():
        return
    rows: dict[str, list[dict[str, str]]] = {"solved": [], "tasks": [], "held_out": []}
    for tag in DOMAINS:
        held_out = make_tasks(tag, HELD_OUT, seed=0, without=set())
        without = {task["prompt"] for task in held_out}
        count = SUMS - HELD_OUT if tag == "maths" else SOLVED + TRAINING
        tasks = make_tasks(tag, count, seed=1 + config.seed, without=without)
        rows["held_out"] += held_out
        rows["solved"] += tasks[: min(SOLVED, count // 2)]
        rows["tasks"] += tasks[min(SOLVED, count // 2) :]
    everything = [task for tasks in rows.values() for task in tasks]
    columns = ("prompt", "ground_truth", "tag")
    for name in ("held_out", "tasks"):
        random.Random(config.seed).shuffle(rows[name])
        write(folder / f"{name}.jsonl", [{column: task[column] for column in columns} for task in rows[name]])
    write(solved, [tiny_programs.solution({**task, "program": task["solution"]}) for task in rows["solved"]])
    words = [str(number) for number in range(41)]
    make_model(model, [*words, *(task["prompt"] + " " + task["solution"] for task in everything)], config.seed)


def make_tasks(tag: str, count: int, *, seed: int, without: set[str]) -> list[dict[str, str]]:
    """Make tasks of one domain with different prompts."""
    rng, taken = random.Random(seed), set(without)
    tasks: list[dict[str, str]] = []
    while len(tasks) < count:
        task = DOMAINS[tag](rng)
        if task["prompt"] not in taken:
            taken.add(task["prompt"])
            tasks.append({**task, "tag": tag})
    return tasks
