"""What the scheduler costs, and how busy it keeps engines: 1,000 to 100,000 trajectories on 8 to 1,024 engines.

    python benchmarks/scheduler_scale.py                  # half an hour on one core, no accelerator
    python benchmarks/scheduler_scale.py --sizes 1000:8 10000:128 --steps 3

The scheduler, the episode player and the driver of engines are those of a run; engines and trainer are simulated in
virtual time (`benchmarks/simulation`). `CPU per request` is the process's CPU time less that of the simulated
engines alone, which are driven a second time by the same calls at the same virtual times. It includes making episodes,
filtering groups, turning tokens into turns, routing and the event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.simulation.engine_model import EngineModel, LognormalLengths  # noqa: E402
from benchmarks.simulation.modes import with_mode  # noqa: E402
from benchmarks.simulation.scenario import Outcome, Scenario, Simulation  # noqa: E402
from benchmarks.simulation.simulated_engines import Call, SimulatedRanks  # noqa: E402
from benchmarks.simulation.virtual_clock import VirtualClockLoop  # noqa: E402

GROUP_SIZE = 8
COLUMNS = ("trajectories", "engines", "mode", "requests", "CPU per request", "simulator's own", "step", "engines busy",
           "of peak tokens/s", "vs sync", "staleness of tokens")  # fmt: skip


@dataclass
class Measured:
    outcome: Outcome
    requests: int
    scheduler_seconds: float
    simulator_seconds: float


def scenario(trajectories: int, engines: int, args: argparse.Namespace) -> Scenario:
    """Return a scenario in which every engine has room for its share of a step's responses, 256 at most."""
    share = min(256, -(-trajectories // engines))
    return Scenario(
        engines=engines,
        engine=EngineModel(max_running_requests=-(-share // GROUP_SIZE) * GROUP_SIZE),
        lengths=LognormalLengths(median=args.median, sigma=args.sigma),
        steps=args.steps,
        groups=trajectories // GROUP_SIZE,
        group_size=GROUP_SIZE,
        max_new_tokens=args.max_new_tokens,
        train_seconds=args.train_seconds,
        sync_seconds=args.sync_seconds,
    )


def measure(case: Scenario) -> Measured:
    """Measure one run, then its engines alone."""
    gc.collect()
    simulation = Simulation(case)
    calls = simulation.ranks.calls = []
    began = time.process_time()
    outcome = simulation.run()
    total = time.process_time() - began
    del simulation
    gc.collect()
    alone = replay(case, calls)
    requests = sum(len(call[3]) for call in calls if call[1] == "submit")  # type: ignore[arg-type]
    return Measured(outcome, requests, total - alone, alone)


def replay(case: Scenario, calls: list[Call]) -> float:
    """Return CPU seconds of the simulated engines under these calls."""
    loop = VirtualClockLoop()
    ranks = SimulatedRanks(case.engines, case.engine, case.lengths, loop=loop, resume=case.resume)
    polls: dict[int, list[tuple[float, float]]] = {}
    others: list[Call] = []
    updates: list[asyncio.Future[None]] = []
    for at, method, rank, argument in calls:
        if method == "poll":
            polls.setdefault(rank, []).append((at, argument))  # type: ignore[arg-type]
        else:
            others.append((at, method, rank, argument))

    async def until(at: float) -> None:
        if at > loop.time():
            await asyncio.sleep(at - loop.time())

    async def poll_one(rank: int, when: list[tuple[float, float]]) -> None:
        for at, budget in when:
            await until(at)
            await ranks.poll(rank, budget)

    async def do_others() -> None:
        for at, method, rank, argument in others:
            await until(at)
            if method == "update":
                updates.append(asyncio.ensure_future(ranks.update_weights(rank, argument)))
            else:
                await getattr(ranks, method)(rank, argument)

    async def everything() -> None:
        await asyncio.gather(do_others(), *(poll_one(rank, when) for rank, when in polls.items()))
        await asyncio.gather(*updates)

    began = time.process_time()
    loop.run_until_complete(everything())
    seconds = time.process_time() - began
    loop.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    sizes = ["1000:8", "10000:8", "10000:128", "100000:128", "100000:1024"]
    parser.add_argument("--sizes", nargs="+", default=sizes, help="trajectories of a step:engines")
    parser.add_argument("--modes", nargs="+", default=["sync", "over-sampled:25%", "async:1"])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3, help="of sizes up to 10,000; the cheapest counts")
    parser.add_argument("--median", type=float, default=600)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--max-new-tokens", type=int, default=8192)
    parser.add_argument("--train-seconds", type=float, default=60.0)
    parser.add_argument("--sync-seconds", type=float, default=5.0)
    args = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for size in args.sizes:
        trajectories, engines = map(int, size.split(":"))
        base = scenario(trajectories, engines, args)
        sync = None
        for mode in args.modes:
            name = mode.replace("25%", str(base.groups // 4))
            case = with_mode(replace(base), name)
            repeats = args.repeats if trajectories <= 10_000 else 1
            best = min((measure(case) for _ in range(repeats)), key=lambda m: m.scheduler_seconds)
            outcome = best.outcome
            sync = sync or outcome
            print(f"| {' | '.join(line(trajectories, mode, best, sync))} |", flush=True)


def line(trajectories: int, mode: str, measured: Measured, sync: Outcome) -> list[str]:
    outcome, requests = measured.outcome, measured.requests
    tokens: Counter[int] = outcome.staleness
    return [
        f"{trajectories:,}",
        f"{outcome.scenario.engines:,}",
        mode,
        f"{requests:,}",
        f"{measured.scheduler_seconds / requests * 1e6:.0f} us",
        f"{measured.simulator_seconds / requests * 1e6:.0f} us",
        f"{outcome.step_seconds:.0f} s",
        f"{outcome.engines_busy:.0%}",
        f"{outcome.engine_utilisation:.0%}",
        f"{outcome.engine_utilisation / sync.engine_utilisation:.2f}",
        ", ".join(f"{age}: {n / tokens.total():.0%}" for age, n in sorted(tokens.items())),
    ]


if __name__ == "__main__":
    main()
