"""How fast environments step in the process pool, compared with upper bounds.

    python benchmarks/env_throughput.py --rounds 5
    python benchmarks/env_throughput.py --only concurrent

The policy is a stub: a random valid response, drawn from the episode's seed, so that all ways play the same episodes
(except gymnasium, which has its own maps and dynamics). The ways take turns in each round, so that the load of the
machine affects all alike:

* bare loop: our environment in this process, without wrappers; `step` gets the name of an action. This is the bound.
* wrapped loop: the same with wrappers, which find the action in a response's text and limit the number of turns.
* pool: as in a run: the wrapped environments in child processes, with `--concurrent` episodes in flight.
* gymnasium: its FrozenLake-v1 in its vector environments, with `--concurrent` copies. Async has a process for each.

`concurrent` then holds thousands of episodes of Sokoban open at once, and measures the memory of the processes beyond
that of empty ones.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import psutil

from roll.envs.base import Env
from roll.envs.env_pool import EnvPool
from roll.envs.env_registry import bare_env, build_env
from roll.envs.wrappers import EnvSpec

STEPS = 20
LAKE = EnvSpec(tag="env", env_type="frozen_lake-v1", env_config={"slippery": True}, max_steps=STEPS)
SOKOBAN = EnvSpec(tag="env", env_type="sokoban-v1", env_config={"dim_room": 6, "num_boxes": 1}, max_steps=STEPS)

Measure = Callable[[Sequence[int]], int]
"""Plays the episodes of these seeds and returns the number of steps."""


@dataclass(frozen=True, slots=True)
class Speed:
    """One measurement."""

    steps_per_second: float
    here_us: float
    """Processor time per step in this process, the policy included."""
    children_us: float
    """The same in the processes it started."""


def timed(measure: Measure, seeds: Sequence[int]) -> Speed:
    children = psutil.Process().children()

    def used() -> float:
        return sum(times.user + times.system for times in (child.cpu_times() for child in children))

    began, here, there = time.perf_counter(), time.process_time(), used()
    steps = measure(seeds)
    seconds = time.perf_counter() - began
    return Speed(steps / seconds, (time.process_time() - here) / steps * 1e6, (used() - there) / steps * 1e6)


def drawn(seed: int, actions: Sequence[str]) -> Callable[[], str]:
    """Return the stub policy of one episode."""
    draw = random.Random(seed).choice
    return lambda: draw(actions)


def in_this_process(env: Env, wrapped: bool, seeds: Sequence[int]) -> int:
    """Play one episode after the other."""
    actions = [f"<answer>{action}</answer>" for action in env.actions] if wrapped else list(env.actions)
    steps = 0
    for seed in seeds:
        act = drawn(seed, actions)
        env.reset(seed, {})
        for _ in range(STEPS):
            steps += 1
            result = env.step(act())
            if result.terminated or result.truncated:
                break
    return steps


async def episode(pool: EnvPool, seed: int, actions: Sequence[str], name: str) -> int:
    """Return steps of one episode, to its end."""
    act = drawn(seed, actions)
    await pool.reset(name, "env", seed, {})
    for step in range(1, STEPS + 1):
        result = await pool.step(name, act())
        if result.terminated or result.truncated:
            await pool.close(name)
            return step
    raise AssertionError("an episode without an end")


async def in_pool_async(pool: EnvPool, actions: Sequence[str], concurrent: int, seeds: Sequence[int]) -> int:
    left = list(seeds)[::-1]

    async def player() -> int:
        steps = 0
        while left:
            seed = left.pop()
            steps += await episode(pool, seed, actions, f"{seed}")
        return steps

    return sum(await asyncio.gather(*(player() for _ in range(concurrent))))


def in_pool(pool: EnvPool, actions: Sequence[str], concurrent: int, seeds: Sequence[int]) -> int:
    return asyncio.run(in_pool_async(pool, actions, concurrent, seeds))


def in_gymnasium(env: object, concurrent: int, seeds: Sequence[int]) -> int:
    """Take as many steps as the other ways' episodes have at most; gymnasium restarts an ended copy by itself."""
    draw = random.Random(seeds[0])
    rounds = max(1, len(seeds) * STEPS // concurrent)
    env.reset(seed=seeds[0])
    for _ in range(rounds):
        env.step([draw.randrange(4) for _ in range(concurrent)])
    return rounds * concurrent


def throughput(args: argparse.Namespace, name: str, spec: EnvSpec, episodes: int) -> None:
    actions = [f"<answer>{action}</answer>" for action in bare_env(spec).actions]
    pools = {count: EnvPool({"env": spec}, num_processes=count) for count in args.processes}
    for pool in pools.values():
        # Before gymnasium forks: its processes would hold open what a pool that is starting waits to see closed.
        pool.wait_ready()
    vectors = gymnasium_vectors(args.concurrent) if spec is LAKE else {}
    try:
        ways: dict[str, Measure] = {
            "bare loop": partial(in_this_process, bare_env(spec), False),
            "wrapped loop": partial(in_this_process, build_env(spec), True),
        }
        for count, pool in pools.items():
            ways[f"pool, {count} process{'es' if count > 1 else ''}"] = partial(in_pool, pool, actions, args.concurrent)
        for kind, vector in vectors.items():
            ways[f"gymnasium {kind}"] = partial(in_gymnasium, vector, args.concurrent)
        speeds: dict[str, list[Speed]] = {way: [] for way in ways}
        loads = []
        for round_ in range(args.rounds + 1):  # the first isn't counted
            turn = list(ways.items())
            shift = round_ % len(turn)
            seeds = range(round_ * episodes, (round_ + 1) * episodes)
            for way, measure in turn[shift:] + turn[:shift]:
                speed = timed(measure, seeds)
                if round_:
                    speeds[way].append(speed)
            loads.append(os.getloadavg()[0])
        report(name, speeds, loads)
        for pool in pools.values():
            print(f"counters: {pool.counters}")
    finally:
        for pool in pools.values():
            pool.shutdown()
        for vector in vectors.values():
            vector.close()


def gymnasium_vectors(concurrent: int) -> dict[str, object]:
    try:
        import gymnasium
    except ImportError:
        print("gymnasium isn't installed: pip install gymnasium")
        return {}
    make = partial(gymnasium.make, "FrozenLake-v1", is_slippery=True, max_episode_steps=STEPS)
    copies = [make] * concurrent
    return {
        "SyncVectorEnv": gymnasium.vector.SyncVectorEnv(copies),
        "AsyncVectorEnv": gymnasium.vector.AsyncVectorEnv(copies),
    }


def report(name: str, speeds: dict[str, list[Speed]], loads: Sequence[float]) -> None:
    print(f"\n{name}; load {min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} cores\n")
    references = [way for way in speeds if way == "bare loop" or way.startswith("gymnasium")]
    shares_of = " | ".join(f"of {way}" for way in references)
    print(f"| way | steps/s (median) | slowest to fastest | {shares_of} | CPU us/step here + in processes |")
    print(f"|---|---|---|{'---|' * len(references)}---|")
    rates = {way: [speed.steps_per_second for speed in measured] for way, measured in speeds.items()}
    for way, values in rates.items():
        paired = [median(a / b for a, b in zip(values, rates[other], strict=True)) for other in references]
        shares = [f"{share:.2f}" for share in paired]
        cpu = f"{median(s.here_us for s in speeds[way]):.0f} + {median(s.children_us for s in speeds[way]):.0f}"
        spread = f"{min(values):,.0f} to {max(values):,.0f}"
        print(f"| {way} | {median(values):,.0f} | {spread} | {' | '.join(shares)} | {cpu} |")


@dataclass(frozen=True, slots=True)
class Held:
    """What it took to hold so many episodes at once."""

    seconds: float
    steps: int
    ended: int
    kib_per_episode: float
    parent_kib_per_episode: float
    empty_mib: float


async def hold(pool: EnvPool, episodes: int, first_seed: int) -> Held:
    """Hold them all: all are reset before any takes a step, and none is closed before all have ended."""
    us = psutil.Process()
    processes = us.children()
    empty, ours = sum(p.memory_info().rss for p in processes), us.memory_info().rss
    actions = [f"<answer>{action}</answer>" for action in bare_env(SOKOBAN).actions]
    began = time.perf_counter()
    names = {f"{seed}": seed for seed in range(first_seed, first_seed + episodes)}
    await asyncio.gather(*(pool.reset(name, "env", seed, {}) for name, seed in names.items()))

    async def steps_of(name: str, seed: int) -> tuple[int, bool]:
        act = drawn(seed, actions)
        for step in range(1, STEPS + 1):
            result = await pool.step(name, act())
            if result.terminated or result.truncated:
                return step, True
        return STEPS, False

    outcomes = await asyncio.gather(*(steps_of(name, seed) for name, seed in names.items()))
    seconds = time.perf_counter() - began
    full, ours_full = sum(p.memory_info().rss for p in processes), us.memory_info().rss
    await asyncio.gather(*(pool.close(name) for name in names))
    return Held(
        seconds,
        sum(steps for steps, _ in outcomes),
        sum(ended for _, ended in outcomes),
        (full - empty) / episodes / 1024,
        (ours_full - ours) / episodes / 1024,
        empty / len(processes) / 2**20,
    )


def concurrent(args: argparse.Namespace) -> None:
    """Measure fresh processes each time, since memory that was freed isn't given back."""
    print(f"\n{args.episodes:,} episodes of Sokoban at once, {STEPS} steps each or until solved\n")
    print("| processes | lost | steps | s | steps/s | KiB per episode (parent) | MiB of an empty process | load |")
    print("|---|---|---|---|---|---|---|---|")
    lines = []
    for count in args.processes:
        held, counters = [], {}
        for round_ in range(args.rounds):
            with EnvPool({"env": SOKOBAN}, num_processes=count) as pool:
                pool.wait_ready()
                held.append(asyncio.run(hold(pool, args.episodes, round_ * args.episodes)))
                counters = pool.counters
        lost = sum(args.episodes - one.ended for one in held)
        cells = [
            f"{count}",
            f"{lost} of {args.episodes * args.rounds:,}",
            f"{median(one.steps for one in held):,.0f}",
            f"{median(one.seconds for one in held):.2f}",
            f"{median(one.steps / one.seconds for one in held):,.0f}",
            # The most of all rounds: the parent's later ones use memory that the first has freed.
            f"{max(one.kib_per_episode for one in held):.1f} ({max(one.parent_kib_per_episode for one in held):.1f})",
            f"{median(one.empty_mib for one in held):.0f}",
            f"{os.getloadavg()[0]:.1f}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)
        lines.append(f"{count}: {counters}")
    print("\ncounters of the last round, by processes: " + "; ".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--concurrent", type=int, default=64, help="episodes under way at once")
    parser.add_argument("--timed-episodes", type=int, help="of a round; default: 2,000, 1,000 of Sokoban")
    parser.add_argument("--episodes", type=int, default=2000, help="held open at once by `concurrent`")
    parser.add_argument("--only", choices=["frozen_lake", "sokoban", "concurrent"])
    args = parser.parse_args()
    if args.only in (None, "frozen_lake"):
        throughput(args, "FrozenLake, 4x4, slippery", LAKE, args.timed_episodes or 2000)
    if args.only in (None, "sokoban"):
        throughput(args, "Sokoban, 6x6, 1 box", SOKOBAN, args.timed_episodes or 1000)
    if args.only in (None, "concurrent"):
        concurrent(args)


if __name__ == "__main__":
    main()
