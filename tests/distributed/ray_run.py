"""A small run on Ray for the tests of whole processes: `python ray_run.py <repository> <seconds to stay> [forked]`.

Prints one JSON line when its workers stand, and one when it ends by itself.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time


def tell(news: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(news) + "\n")
    sys.stdout.flush()


def run() -> int:
    from distributed_workers import Echo

    from roll.distributed.executors import make_executor
    from roll.distributed.placement import RolePlacement
    from roll.distributed.rank_parent import THREADS, rank_threads
    from roll.distributed.ray_session import begun_session

    role = RolePlacement("actor", ((0,), (1,)))
    forked = contextlib.ExitStack()
    if "forked" in sys.argv:
        forked.enter_context(begun_session({}, ["distributed_workers"], {THREADS: str(rank_threads(1, 2))}))
    with forked, make_executor("ray", [role], rpc_timeout=60) as executor:
        cluster = executor.create_cluster(role, Echo)
        reduced = cluster.call(Echo.all_reduce)
        pids = [ping.pid for ping in cluster.call(Echo.ping)]
        temp = str(executor._session.path)  # type: ignore[attr-defined]
        tell({"reduced": reduced, "pids": pids, "temp": temp})
        time.sleep(float(sys.argv[2]))
        tell({"greetings": cluster.call(Echo.greet, "still")})
    return 0


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    from roll.cli.exits import guarded
    from roll.utils.signals import install

    install()
    sys.exit(guarded(run))
