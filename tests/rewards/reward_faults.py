"""A reward function that does harm at random and otherwise returns the number that it was given: for mix-ups."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import sys
import threading
import time
from typing import Any

from roll.isolation.processes.channel import Channel
from roll.rewards.base import Reward, RewardRequest, RewardSpec
from roll.rewards.reward_pool import RewardPool
from roll.types.trajectory import Task

TIMEOUT_S = 3.0


def number(response: str, task: Task) -> Any:
    fault, _, value = response.partition(" ")
    result = float(value)
    if fault == "fork":
        os.fork()
    elif fault == "fork_in_c":
        ctypes.CDLL(None).fork()
    elif fault == "fork_late":
        if os.fork() == 0:
            time.sleep(0.05)
    elif fault == "garbage":
        _garbage(range(3, 150))
    elif fault == "garbage_everywhere":
        _garbage(int(name) for name in os.listdir("/proc/self/fd"))
    elif fault == "exit":
        os._exit(0)
    elif fault == "hang":
        time.sleep(1000)
    elif fault == "slow":
        time.sleep(random.random() * 0.1)
    elif fault == "huge":
        return Reward(result, {"x" * 100 + str(i): 1.0 for i in range(5000)})
    elif fault == "wide":
        return Reward(result, {"x" * 500 + str(i): result for i in range(900)})
    elif fault == "late":
        channel = _channel()
        threading.Thread(target=_answer_late, args=(channel, result), daemon=True).start()
    elif fault == "raise":
        raise KeyError(value)
    return result


def _channel() -> Channel:
    frame = sys._getframe()
    while "channel" not in frame.f_locals or not isinstance(frame.f_locals["channel"], Channel):
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_locals["channel"]  # type: ignore[no-any-return]


def _answer_late(channel: Channel, result: float) -> None:
    """Send what looks like an answer in one packet, after the call's own."""
    time.sleep(random.random() * 0.02)
    for guess in range(20):
        channel.send([(guess, "ok", result + 0.5, {})])


def _garbage(fds: Any) -> None:
    for fd in fds:
        if fd > 2:
            with contextlib.suppress(OSError):
                os.write(fd, random.randbytes(random.randrange(1, 200)))


FAULTS = {
    "fork": "ok", "fork_in_c": "ok", "fork_late": "ok", "garbage": "ok", "garbage_everywhere": "ok", "exit": "error",
    "slow": "ok", "huge": "error", "wide": "ok", "late": "ok", "raise": "error", "hang": "timeout",
}  # fmt: skip


def play(count: int, *, seed: int, share: float, hangs: int) -> dict[str, int]:
    """Score `count` responses, a share of them with a fault; every reward is the one of its own response."""
    rng = random.Random(seed)
    faults = [fault for fault in FAULTS if fault != "hang"]
    asked = [rng.choice(faults) if rng.random() < share else "none" for _ in range(count)]
    for place in rng.sample(range(count), hangs):
        asked[place] = "hang"
    requests = [
        RewardRequest(
            id=f"r{i}",
            domain="d",
            response=f"{fault} {i}",
            task=Task(id=f"t{i}", source="t", payload={}, seed=0, tag="t", domain="d"),
        )
        for i, fault in enumerate(asked)
    ]
    spec = RewardSpec(name=f"{__file__}:number")
    with RewardPool({"d": spec}, num_processes=2, timeout_s=TIMEOUT_S, retries=0) as pool:
        pool.wait_ready()
        results = pool.score(requests)
        counters = dict(pool.counters)
    assert [result.id for result in results] == [request.id for request in requests]
    wrong = []
    for i, (fault, result) in enumerate(zip(asked, results, strict=True)):
        mixed_up = result.reward is not None and result.reward.value != i
        if mixed_up or result.status != FAULTS.get(fault, "ok"):
            wrong.append((i, fault, result))
    assert not wrong, (len(wrong), wrong[:3])
    return counters
