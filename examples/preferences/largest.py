"""What is learnt here: which of three numbers is the largest. The right one is preferred to others, and to nonsense.

`prepare` of the configurations names `prepare` below. It makes in `output/preferences`, unless they are there:

    random_model/         a transformer of 85,000 random parameters that knows the words
    answers.jsonl         conversations: a prompt, and one of its numbers
    pairs.jsonl           prompt, chosen, rejected
    held_out_pairs.jsonl  the same for numbers that no row above has together
    prompts.jsonl         prompts of pairs.jsonl for a policy whose answers a reward model scores
    held_out.jsonl        prompts of held_out_pairs.jsonl with the right answer
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from small_agents import make_model, write

NUMBERS = 20
PAIRS, HELD_OUT = 2000, 400


def prepare(config: Any) -> None:
    """Make rows and model; the rows are the same for every seed, the model isn't."""
    model = Path(config.pretrain)
    folder = model.parent
    if not (folder / "held_out.jsonl").is_file():
        taught, held_out = pairs()
        write(folder / "answers.jsonl", list(answers(taught)))
        write(folder / "pairs.jsonl", taught)
        write(folder / "held_out_pairs.jsonl", held_out)
        write(folder / "prompts.jsonl", list(tasks(taught, "scored")))
        write(folder / "held_out.jsonl", list(tasks(held_out, "checked")))
    if not (model / "config.json").is_file():
        make_model(model, [question(range(NUMBERS))], config.seed)


def question(numbers: Iterable[int]) -> str:
    """Return the prompt."""
    return f"Which is the largest of {' '.join(map(str, numbers))}?"


def pairs() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return pairs to learn from, and pairs about other sets of numbers."""
    draw = random.Random("largest")
    sets = list(itertools.combinations(range(NUMBERS), 3))
    draw.shuffle(sets)
    unseen = len(sets) // 5
    words = [*question(range(NUMBERS)).split(), "\n"]

    def some(count: int, among: list[tuple[int, ...]]) -> list[dict[str, str]]:
        rows = []
        for _ in range(count):
            numbers = draw.sample(draw.choice(among), 3)
            wrong = str(draw.choice([number for number in range(NUMBERS) if number != max(numbers)]))
            nonsense = " ".join([*draw.choices(words, k=draw.randint(0, 3)), draw.choice(words[:-1])])
            rejected = draw.choice([wrong, nonsense if nonsense != str(max(numbers)) else wrong])
            rows.append({"prompt": question(numbers), "chosen": str(max(numbers)), "rejected": rejected})
        return rows

    return some(PAIRS, sets[unseen:]), some(HELD_OUT, sets[:unseen])


def answers(rows: Iterable[dict[str, str]]) -> Iterable[dict[str, Any]]:
    """Yield conversations in which nobody minds what is right."""
    draw = random.Random("answers")
    for row in rows:
        number = draw.choice([word for word in row["prompt"].rstrip("?").split() if word.isdigit()])
        said = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": number}]
        yield {"messages": said}


def tasks(rows: Iterable[dict[str, str]], tag: str) -> Iterable[dict[str, str]]:
    """Yield prompts with the answer that was preferred."""
    for i, row in enumerate(rows):
        yield {"id": str(i), "tag": tag, "prompt": row["prompt"], "ground_truth": row["chosen"]}


if __name__ == "__main__":
    print(json.dumps(pairs()[0][:3], indent=1))
