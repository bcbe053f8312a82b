"""What the columns of responses cost between an engine and the training batch, without either.

    OMP_NUM_THREADS=1 python benchmarks/rollout_columns.py

A token's id, log-prob and version on their way: recorded by an engine's front end, pickled there and read in the
controller as Ray does it (without the call itself), cut into the rows of a batch. Processor time, the best round.
"""

from __future__ import annotations

import argparse
import pickle
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from roll.pipelines.rollouts.assemble import Rollouts, assemble  # noqa: E402
from roll.strategies.base import Completion, Request, SamplingParams  # noqa: E402
from roll.strategies.engines.responses import Response, ResponseRules  # noqa: E402
from roll.types.trajectory import Group, Task, Trajectory, Turn  # noqa: E402

PROMPT = tuple(range(100))
TASK = Task(id="task", source="benchmark", payload={}, seed=0, tag="", domain="")
RULES = ResponseRules(frozenset({0}), 1 << 20)


def recorded(sampled: list[tuple[list[int], list[float]]]) -> list[Completion]:
    """Return what an engine's front end makes of whole responses."""
    completions = []
    for number, (tokens, logprobs) in enumerate(sampled):
        params = SamplingParams(max_new_tokens=len(tokens) + 1)
        response = Response(Request(id=str(number), prompt_ids=PROMPT, params=params, seed=1))
        response.record(tokens, logprobs, 7, RULES)
        completions.append(response.completion("stop"))
    return completions


def cut(completions: list[Completion]) -> Rollouts:
    """Return the training rows of one turn for each response."""
    turns = [
        Turn(
            prompt_ids=PROMPT,
            response_ids=each.array("token_ids"),
            logprobs=each.array("logprobs"),
            versions=each.array("versions"),
            finish_reason=each.finish_reason,
        )
        for each in completions
    ]
    members = [Trajectory(task_id="task", member=i, turns=(turn,), reward=0.0) for i, turn in enumerate(turns)]
    return assemble([Group(task=TASK, trajectories=tuple(members))])


def best(work: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    """Return the processor seconds of the fastest round, and what it made."""
    fastest, made = float("inf"), None
    for _ in range(rounds):
        begun = time.process_time()
        made = work()
        fastest = min(fastest, time.process_time() - begun)
    return fastest, made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024, help="of each")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rng, count = random.Random(0), args.responses * args.tokens
    sampled = [
        ([rng.randrange(1, 150_000) for _ in range(args.tokens)], [-rng.random() for _ in range(args.tokens)])
        for _ in range(args.responses)
    ]
    seconds: dict[str, float] = {}
    seconds["recorded"], completions = best(lambda: recorded(sampled), args.rounds)
    seconds["pickled"], sent = best(lambda: pickle.dumps(completions, protocol=5), args.rounds)
    seconds["read"], arrived = best(lambda: pickle.loads(sent), args.rounds)
    seconds["cut into rows"], rollouts = best(lambda: cut(arrived), args.rounds)
    assert arrived == completions and int(rollouts.batch.action_mask.sum()) == count
    print(f"{args.responses} responses of {args.tokens} tokens, {len(sent) / count:.1f} bytes a token on the way\n")
    print("| step | processor ms | us per token |\n|---|---|---|")
    for name, each in seconds.items():
        print(f"| {name} | {each * 1e3:.0f} | {each / count * 1e6:.2f} |")


if __name__ == "__main__":
    main()
