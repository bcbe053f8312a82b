"""How fast a pool of processes scores responses whose reward takes microseconds.

    python benchmarks/reward_throughput.py --rounds 5

Groups of 64 responses are scored by the reward `gsm8k`, in turns by a loop in this process and by pools. A pool is
asked as in a run: an episode per response, all of a group in one tick of an event loop. What a run adds, such as
sampling, is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import psutil

from roll.rewards.base import RewardRequest, RewardSpec
from roll.rewards.reward_pool import RewardPool
from roll.rewards.reward_registry import load_reward
from roll.types.trajectory import Task

SPEC = RewardSpec(name="gsm8k")
GROUP = 64


def requests(group: int) -> list[RewardRequest]:
    task = Task(id=f"{group}", source="", payload={"ground_truth": "72"}, seed=0, tag="", domain="d")
    return [
        RewardRequest(id=f"{group}#{i}", domain="d", response=f"Half of {2 * i} is {i}.\n#### {i}", task=task)
        for i in range(GROUP)
    ]


def in_this_process(groups: int) -> float:
    function = load_reward(SPEC)
    scores = [function.score(request) for group in range(groups) for request in requests(group)]
    return sum(score.value for score in scores if score is not None)


async def in_pool_async(pool: RewardPool, groups: int) -> float:
    total = 0.0
    for group in range(groups):
        results = await asyncio.gather(*(asyncio.wrap_future(pool.submit(request)) for request in requests(group)))
        total += sum(result.reward.value for result in results if result.reward is not None)
    return total


def in_pool(pool: RewardPool, groups: int) -> float:
    return asyncio.run(in_pool_async(pool, groups))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=30, help="of 64 responses, in a round")
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    args = parser.parse_args()
    pools = {count: RewardPool({"d": SPEC}, num_processes=count) for count in args.processes}
    ways: dict[str, Callable[[int], float]] = {"loop": in_this_process}
    for count, pool in pools.items():
        pool.wait_ready()
        ways[f"pool, {count} process{'es' if count > 1 else ''}"] = partial(in_pool, pool)
    expected = in_this_process(args.groups)
    figures: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways}

    def used() -> float:
        """Return the CPU seconds of our processes, those that have ended since (a pool's start has some) included."""
        ended = os.times()
        alive = [child.cpu_times() for child in psutil.Process().children()]
        return ended.children_user + ended.children_system + sum(times.user + times.system for times in alive)

    for round_ in range(args.rounds + 1):  # the first isn't counted
        for way, measure in ways.items():
            began, here, there = time.perf_counter(), time.process_time(), used()
            assert measure(args.groups) == expected
            count = args.groups * GROUP / 1e6
            taken = (time.perf_counter() - began, time.process_time() - here, used() - there)
            if round_:
                figures[way].append((taken[0] / count, taken[1] / count, taken[2] / count))
    print(f"\nload {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    print("| way | rewards/s (median) | slowest to fastest | CPU us/reward here + in processes |\n|---|---|---|---|")
    for way, rows in figures.items():
        clock, here, there = zip(*rows, strict=True)
        spread = f"{1e6 / max(clock):,.0f} to {1e6 / min(clock):,.0f}"
        print(f"| {way} | {1e6 / median(clock):,.0f} | {spread} | {median(here):.0f} + {median(there):.0f} |")
    for pool in pools.values():
        pool.shutdown()


if __name__ == "__main__":
    main()
