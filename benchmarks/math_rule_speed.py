"""Processor time of `math_rule` on the answers of a data set, alternating with another checkout's.

python benchmarks/math_rule_speed.py --data deepmath.jsonl --against ../before

Each row's own answer, boxed, and the next row's are scored against the row's `ground_truth`. The time is that of the
process and of all processes that it starts, which are waited for; their start is not counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

CHECKOUT = Path(__file__).resolve().parents[1]
GOLDS = ["72", r"\frac{1}{2}", "0.75", r"\sqrt{2}", "(1, 2)", r"x^2 + 1", "Yes", r"[0, \infty)", r"\frac{\pi}{4}"]
"""What is scored without `--data`."""

ROUND = r"""
import ctypes, json, os, resource, sys
import psutil
from roll.rewards.math_rule import math_rule
from roll.types.trajectory import Task

ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: the workers of an ended guardian are waited for here

def paid(gold, answer):
    task = Task(id="row", source="rows", payload={"ground_truth": gold}, seed=0, tag="rows", domain="math")
    return math_rule("So it is \\boxed{%s}." % answer, task).value == 1.0

def spent_so_far():
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:4]) for process in processes)  # user, system, and those of ended children

golds = json.load(sys.stdin)
paid("x+1", "1+x")
start = spent_so_far()
counts = dict.fromkeys(("refused", "own answer not paid", "next answer paid"), 0)
for gold, other in zip(golds, golds[1:] + golds[:1]):
    try:
        counts["own answer not paid"] += not paid(gold, gold)
        counts["next answer paid"] += gold != other and paid(gold, other)
    except ValueError:
        counts["refused"] += 1
for process in psutil.Process().children(recursive=True):
    process.kill()
try:
    while True:
        os.wait()
except ChildProcessError:
    pass
spent = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
print(json.dumps({"ms": 1000 * (spent - start) / (2 * len(golds)), **counts}))
"""


def read_golds(path: Path | None, rows: int) -> list[str]:
    if path is None:
        return [GOLDS[i % len(GOLDS)] for i in range(rows)]
    with path.open(encoding="utf-8") as lines:
        return [str(json.loads(line)["ground_truth"]) for line in itertools.islice(lines, rows)]


def one_round(checkout: Path, golds: list[str]) -> dict[str, float]:
    """Score all rows in a process of its own, with the package of `checkout`."""
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ROUND],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        input=json.dumps(golds),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: dict[str, float] = json.loads(process.stdout)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row per round, then the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="JSON Lines with ground_truth; a few answers of its own without it")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path, help="another checkout of this project")
    args = parser.parse_args(arguments)
    golds = read_golds(args.data, args.rows)
    sides = {"this": CHECKOUT} | ({"against": args.against.resolve()} if args.against else {})
    times: dict[str, list[float]] = {name: [] for name in sides}
    print("| round | checkout | ms per answer | refused | own answer not paid | next answer paid |")
    print("|---|---|---|---|---|---|")
    for number in range(1, args.rounds + 1):
        for name in sorted(sides, reverse=number % 2 == 0):  # who is first takes turns
            result = one_round(sides[name], golds)
            times[name].append(result.pop("ms"))
            counts = " | ".join(map(str, result.values()))
            print(f"| {number} | {name} | {times[name][-1]:.2f} | {counts} |", flush=True)
    print(f"\n{len(golds)} rows, median: {', '.join(f'{name} {median(ms):.2f} ms' for name, ms in times.items())}")
    if args.against:
        ratios = [this / other for this, other in zip(times["this"], times["against"], strict=True)]
        print(f"this / against: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
