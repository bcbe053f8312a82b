"""`math_rule` beside math-verify and verl's scorers, on answers whose equality is known by construction.

python benchmarks/math_rule_pairs.py --verl verl-0.9.1-py3-none-any.whl

Prints for each kind of `tests/rewards/answer_pairs.py` the share of pairs judged right, and in brackets how many
unequal answers were paid. verl's scorers are read from its wheel, or from a folder that holds `verl`; without `--verl`
their columns are left out, and math-verify's where it isn't installed (`pip install math-verify==0.9.0`). `prime_math`
needs pylatexenc. Every scorer gets the answer in the form it looks for.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import logging
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "rewards"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from answer_pairs import answer_pairs
from answer_pairs_form import AnswerPair

from roll.rewards.math_rule import math_rule
from roll.types.trajectory import Task

Scorer = Callable[[str, str], bool]
"""Takes the gold and the answer; whether the answer is paid."""


def ours(gold: str, answer: str) -> bool:
    task = Task(id="pair", source="pairs", payload={"ground_truth": gold}, seed=0, tag="pairs", domain="math")
    return math_rule(rf"\boxed{{{answer}}}", task).value == 1.0


def by_math_verify(gold: str, answer: str) -> bool:
    from math_verify import parse, verify

    return verify(parse(f"${gold}$"), parse(rf"\boxed{{{answer}}}"))


def verl_scorers(path: Path) -> dict[str, Scorer]:
    """Return the scorers of verl's wheel or checkout at `path`, without the rest of verl."""
    if not path.exists():
        raise SystemExit(f"--verl: there is no {path}; `pip download verl==0.9.1 --no-deps` fetches the wheel")
    for name in ("verl", "verl.utils"):  # their own __init__ imports ray, tensordict and more
        package = types.ModuleType(name)
        package.__path__ = [str(path.joinpath(*name.split(".")))]
        sys.modules[name] = package
    load = importlib.import_module
    math_reward, math_dapo, math_verify = (
        load(f"verl.utils.reward_score.{name}") for name in ("math_reward", "math_dapo", "math_verify")
    )
    scorers: dict[str, Scorer] = {
        "math_reward": lambda gold, answer: math_reward.compute_score(rf"\boxed{{{answer}}}", gold) > 0,
        "math_dapo": lambda gold, answer: bool(math_dapo.compute_score(f"Answer: {answer}", gold)["acc"]),
        "math_verify": lambda gold, answer: (
            # In this process: compute_score starts four others, which can't import from a wheel.
            math_verify._verify_in_subprocess(rf"\boxed{{{gold}}}", rf"\boxed{{{answer}}}") > 0
        ),
    }
    try:
        prime_math = load("verl.utils.reward_score.prime_math")
    except ModuleNotFoundError as error:
        print(f"without prime_math: {error}")
    else:
        scorers["prime_math"] = lambda gold, answer: bool(prime_math.compute_score(rf"\boxed{{{answer}}}", gold)[0])
    return {f"verl {name}": scorer for name, scorer in scorers.items()}


def is_paid(scorer: Scorer, gold: str, answer: str) -> bool:
    """Return whether the scorer pays; one that raises doesn't."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            return scorer(gold, answer)
        except Exception:  # noqa: BLE001 - others' scorers raise what they like
            return False


def cell(scorer: Scorer, pairs: Sequence[AnswerPair]) -> tuple[int, int]:
    """Return how many pairs the scorer judges right, and how many unequal answers it pays."""
    paid = [is_paid(scorer, pair.gold, pair.answer) for pair in pairs]
    right = sum(was_paid == pair.equal for was_paid, pair in zip(paid, pairs, strict=True))
    return right, sum(was_paid and not pair.equal for was_paid, pair in zip(paid, pairs, strict=True))


def swapped(pairs: Sequence[AnswerPair]) -> list[AnswerPair]:
    return [AnswerPair(pair.kind, pair.answer, pair.gold, pair.equal) for pair in pairs]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row per kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verl", type=Path, help="wheel of verl, or a folder that holds the package")
    parser.add_argument("--kinds", nargs="+", help="only these kinds")
    parser.add_argument("--each", type=int, help="only the first pairs of each kind")
    parser.add_argument("--swapped", action="store_true", help="gold and answer swapped")
    args = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    pairs = swapped(answer_pairs()) if args.swapped else answer_pairs()
    scorers: dict[str, Scorer] = {"math_rule": ours}
    if importlib.util.find_spec("math_verify"):
        scorers["math-verify"] = by_math_verify
    if args.verl is not None:
        scorers |= verl_scorers(args.verl.resolve())
    totals = dict.fromkeys(scorers, (0, 0))
    counted = 0
    print(f"| kind | pairs | {' | '.join(scorers)} |\n|{'---|' * (len(scorers) + 2)}")
    for kind in args.kinds or dict.fromkeys(pair.kind for pair in pairs):
        of_kind = [pair for pair in pairs if pair.kind == kind][: args.each]
        counted += len(of_kind)
        cells = {name: cell(scorer, of_kind) for name, scorer in scorers.items()}
        totals = {name: (totals[name][0] + right, totals[name][1] + paid) for name, (right, paid) in cells.items()}
        print(row(kind, len(of_kind), cells.values()), flush=True)
    print(row("all", counted, totals.values()))


def row(name: str, count: int, cells: Iterable[tuple[int, int]]) -> str:
    return f"| {name} | {count} | {' | '.join(f'{100 * right / count:.0f} % ({paid})' for right, paid in cells)} |"


if __name__ == "__main__":
    main()
