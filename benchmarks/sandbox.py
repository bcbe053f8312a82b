"""How many small programs a second run in a sandbox.

    nice -n -10 python benchmarks/sandbox.py --programs 500

Each program prints the sum of a list, in a fresh process. `threads` of this process have programs run at once, as
processes that score responses do; each mechanism starts its warm parents before the clock. The ways take turns in each
round, so that the load of the machine affects all alike. `cold interpreter` is a bare `python -I -S` for every program,
contained by nothing: what a warm parent saves.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

from roll.isolation.sandbox.base import Limits, Program, SandboxUnavailable
from roll.isolation.sandbox.local import LocalSandbox
from roll.isolation.sandbox.open_sandbox import open_sandbox

SOURCE = "import json\nprint(json.dumps(sum([3, 4, 5])))\n"
LIMITS = Limits()


def cold() -> None:
    done = subprocess.run([sys.executable, "-I", "-S", "-c", SOURCE], capture_output=True, check=True)
    assert done.stdout == b"12\n"


def warm(sandbox: LocalSandbox) -> Callable[[], None]:
    def run() -> None:
        outcome = sandbox.run(Program(source=SOURCE), LIMITS)
        assert outcome.stdout == b"12\n", outcome

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description="How many small programs a second run in a sandbox.")
    parser.add_argument("--programs", type=int, default=500, help="per way and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=["sandlock", "bwrap", "unconfined"])
    options = parser.parse_args()
    ways: dict[str, Callable[[], None]] = {"cold interpreter": cold}
    sandboxes = []
    for name in options.only:
        try:
            open_sandbox(name).close()
        except SandboxUnavailable as error:
            print(f"{name} is left out: {str(error).splitlines()[0][:200]}")
            continue
        sandboxes.append(LocalSandbox(name, parallel=options.threads))
        ways[name] = warm(sandboxes[-1])
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    loads = [os.getloadavg()[0]]
    with ThreadPoolExecutor(options.threads) as pool:
        for run in ways.values():
            list(pool.map(lambda _, run=run: run(), range(2 * options.threads)))
        for _ in range(options.rounds):
            for name, run in ways.items():
                began = time.perf_counter()
                list(pool.map(lambda _, run=run: run(), range(options.programs)))
                speeds[name].append(options.programs / (time.perf_counter() - began))
            loads.append(os.getloadavg()[0])
    for sandbox in sandboxes:
        sandbox.close()
    print("| way | programs a second, median | of the rounds |")
    print("|---|---|---|")
    for name, values in speeds.items():
        print(f"| {name} | {median(values):.0f} | {', '.join(f'{speed:.0f}' for speed in values)} |")
    print(
        f"load of the machine over a minute, before and after each round: {', '.join(f'{load:.1f}' for load in loads)}"
    )


if __name__ == "__main__":
    main()
