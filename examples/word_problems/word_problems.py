"""Divide MAWPS into rows for the warm start, for reinforcement learning and for validation.

    python examples/word_problems/word_problems.py mawps.jsonl --output output/word_problems --seed 1

A row of the file has `input`, a word problem, and `target`, its number. Problems that differ in names and numbers alone
stay together: no held-out one has a near copy in training. The held-out rows are the same for all seeds. Writes
`solved.jsonl` (prompt, response), `tasks.jsonl` and `held_out.jsonl` (prompt, ground truth).
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from small_agents import write

HELD_OUT, SOLVED = 1_000, 300
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?|\.\d+")
_LONG = re.compile(r"\.\d{5}")
_WORD = re.compile(r"\d[\d,]*(?:\.\d+)?|\.\d+|[A-Za-z]+")
_OTHERS = (1_009, 211, 47)
"""Numbers in the place of a text's; with more of them, a text isn't solved here."""


@dataclass(frozen=True)
class Problem:
    """One word problem."""

    text: str
    target: str


@dataclass(frozen=True)
class Quantity:
    """A number of a text or of a step."""

    value: Fraction
    other: Fraction
    """What it would be if the text had the numbers of `_OTHERS`."""


@dataclass(frozen=True)
class Split:
    """Three lists that share no text. None of `held_out` has a near copy in the others."""

    solved: list[Problem]
    tasks: list[Problem]
    held_out: list[Problem]


def read(file: Path) -> list[Problem]:
    """Return the problems of a file without repetitions, without those that have two answers, and without those whose
    numbers are fractions cut to sixteen decimals (0.3333333333333333): nobody writes their answers."""
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines() if line.strip()]
    problems: dict[str, Problem] = {}
    answers: dict[str, set[str]] = {}
    for row in rows:
        problem = Problem(" ".join(row["input"].split()), written(Fraction(str(row["target"]))))
        problems.setdefault(normalised(problem.text), problem)
        answers.setdefault(normalised(problem.text), set()).add(problem.target)
    return [
        problem
        for text, problem in problems.items()
        if len(answers[text]) == 1 and not _LONG.search(f"{problem.text} {problem.target}")
    ]


def normalised(text: str) -> str:
    """Return a text's words and numbers, without case, punctuation and spaces."""
    return " ".join(word.replace(",", "").lower() for word in _WORD.findall(text))


def outline(text: str, names: set[str]) -> str:
    """Return a text without its numbers and names."""
    words = normalised(text).split()
    return " ".join("#" if word[0] in ".0123456789" else "@" if word in names else word for word in words)


def names_in(texts: Iterable[str]) -> set[str]:
    """Return words that begin with a capital letter inside of a sentence, and never without one."""
    capital = {word.lower() for text in texts for word in re.findall(r"(?<=[a-z,] )[A-Z][a-z]+", text)}
    return capital - {word for text in texts for word in re.findall(r"\b[a-z]+\b", text)}


def split(problems: Sequence[Problem], *, seed: int, held_out: int = HELD_OUT, solved: int = SOLVED) -> Split:
    """Divide the problems. The seed decides which of those that aren't held out are shown solved."""
    names = names_in([problem.text for problem in problems])
    alike: dict[str, list[Problem]] = {}
    for problem in problems:
        alike.setdefault(outline(problem.text, names), []).append(problem)
    groups = list(alike.values())
    random.Random(0).shuffle(groups)
    kept: list[Problem] = []
    while groups and len(kept) < held_out:
        kept += groups.pop()
    rest = [problem for group in groups for problem in group]
    random.Random(seed).shuffle(rest)
    clear = [problem for problem in rest if solution(problem) is not None][:solved]
    chosen = set(clear)
    return Split(clear, [problem for problem in rest if problem not in chosen], kept)


def solution(problem: Problem) -> str | None:
    """Return `19 + 45 = 64, 64 - 56 = 8`: how the numbers of the text give the answer, in one or two steps.

    None when they don't, or when they do in ways that other numbers would tell apart: MAWPS has the answers alone.
    """
    texts = [word.replace(",", "") for word in _NUMBER.findall(problem.text)]
    quantities = [Quantity(Fraction(text), Fraction(other)) for text, other in zip(texts, _OTHERS, strict=False)]
    if len(quantities) < len(texts):
        return None
    ways = [(text, end.other) for text, end in calculations(quantities) if end.value == Fraction(problem.target)]
    return ways[0][0] if len({other for _, other in ways}) == 1 else None


def calculations(quantities: Sequence[Quantity]) -> Iterator[tuple[str, Quantity]]:
    """Yield what two of the quantities give, and two with a third one."""
    for i, j in combinations(range(len(quantities)), 2):
        for text, between in steps(quantities[i], quantities[j]):
            yield text, between
            for k in {*range(len(quantities))} - {i, j}:
                for last, end in steps(between, quantities[k]):
                    yield f"{text}, {last}", end


def steps(a: Quantity, b: Quantity) -> Iterator[tuple[str, Quantity]]:
    """Yield what two quantities give, without negative results and those with more than four decimals."""
    results = [("+", a, b, a.value + b.value, a.other + b.other), ("*", a, b, a.value * b.value, a.other * b.other)]
    for x, y in ((a, b), (b, a)):
        results.append(("-", x, y, x.value - y.value, x.other - y.other))
        if y.value and y.other:
            results.append(("/", x, y, x.value / y.value, x.other / y.other))
    for sign, x, y, value, other in results:
        if value >= 0 and (value * 10_000).denominator == 1:
            yield f"{written(x.value)} {sign} {written(y.value)} = {written(value)}", Quantity(value, other)


def written(value: Fraction) -> str:
    """Return a number as it is usually written."""
    return str(value) if value.denominator == 1 else repr(float(value))


def write_split(parts: Split, folder: Path) -> None:
    """Write the three files."""
    write(folder / "solved.jsonl", [{"prompt": p.text, "response": f" {solution(p)}"} for p in parts.solved])
    write(folder / "tasks.jsonl", [task(problem) for problem in parts.tasks])
    write(folder / "held_out.jsonl", [task(problem) for problem in parts.held_out])


def task(problem: Problem) -> Mapping[str, Any]:
    """Return a row of `pipeline: rlvr`."""
    return {"prompt": problem.text, "ground_truth": problem.target, "tag": "word_problems"}


def main() -> None:
    """Divide, write, and print how many."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="mawps.jsonl")
    parser.add_argument("--output", type=Path, default=Path("output/word_problems"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--held-out", type=int, default=HELD_OUT)
    parser.add_argument("--solved", type=int, default=SOLVED)
    options = parser.parse_args()
    problems = read(options.file)
    parts = split(problems, seed=options.seed, held_out=options.held_out, solved=options.solved)
    write_split(parts, options.output)
    names = names_in([problem.text for problem in problems])
    alike = Counter(outline(problem.text, names) for problem in problems)
    print(f"{len(problems)} problems; {sum(n for n in alike.values() if n > 1)} have a near copy, on their own side")
    print(f"{len(parts.solved)} solved, {len(parts.tasks)} tasks, {len(parts.held_out)} held out: {options.output}")


if __name__ == "__main__":
    main()
