"""Reward functions with every kind of bad behaviour, for the tests of loading and of the pool."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from roll.rewards.base import Reward
from roll.rewards.reward_worker import RewardHandler
from roll.types.trajectory import Task


def length(response: str, task: Task, *, scale: float = 1.0) -> float:
    return len(response) * scale


def with_parts(response: str, task: Task) -> Reward:
    return Reward(1.0, {"length": float(len(response))})


def by_finish(response: str, task: Task, finish_reason: str) -> float:
    return float(finish_reason == "stop")


def needs_more(response: str, task: Task, *, url: str) -> float:
    return 0.0


def one_argument(response: str) -> float:
    return 0.0


async def asynchronous(response: str, task: Task) -> float:
    await asyncio.sleep(0)
    return float(len(response))


def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):  # type: ignore[no-untyped-def]
    assert data_source == "math"
    right = solution_str == ground_truth
    return {"score": scale * right, "right": right, "length": len(solution_str), "remark": "fine"}


def verl_plain(data_source, solution_str, ground_truth):  # type: ignore[no-untyped-def]
    return float(solution_str == ground_truth)


def trl_columns(prompts: list[str], completions: list[str], level: list[int]) -> list[float]:
    return [len(done) + float(n) for _, done, n in zip(prompts, completions, level, strict=True)]


def trl_chat(completions: list[list[dict[str, str]]], **columns: Any) -> list[float]:
    assert columns["level"] == [2]
    return [float(len(done[0]["content"])) for done in completions]


def lists(responses: list[str], tasks: list[Task], finish_reasons: list[str]) -> list[Reward]:
    """A call with `die` in it takes all with it; one with `raise` fails."""
    if "die" in responses:
        os._exit(1)
    if "hang" in responses:
        time.sleep(1000)
    if "raise" in responses:
        raise KeyError("raise")
    stopped = [float(reason == "stop") for reason in finish_reasons]
    together = float(len(responses))
    return [Reward(len(r), {"together": together, "stopped": s}) for r, s in zip(responses, stopped, strict=True)]


def wrong_lists(responses: list[str], tasks: list[Task]) -> list[float]:
    return [0.0] * (len(responses) + 1)


def lists_with_option(responses: list[str], tasks: list[Task], threshold: float) -> list[float]:
    return [0.0] * len(responses)


async def obey_async(response: str, task: Task) -> float:
    """Do what the response says: `sleep` waits as one waits for a service, `block` blocks the event loop."""
    command, _, argument = response.partition(" ")
    if command == "sleep":
        await asyncio.sleep(float(argument))
    elif command == "block":
        time.sleep(1000)
    elif command == "stubborn":
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1000)
    elif command == "exit":
        os._exit(3)
    elif command == "raise":
        raise LookupError("no such service")
    elif command == "fork":
        os.fork()
    elif command == "env":
        return float(argument in os.environ)
    return float(argument or 0)


NOT_A_FUNCTION = 3


def obey(response: str, task: Task, *, folder: str = "") -> Any:
    """Do what the response says; `folder` is where attempts are counted and process ids written."""
    command, _, argument = response.partition(" ")
    action = _ACTIONS[command]
    return action(argument, Path(folder))


def _sleep(argument: str, folder: Path) -> float:
    time.sleep(float(argument))
    return float(argument)


def _count(argument: str, folder: Path) -> float:
    """Fails until the n-th attempt."""
    path = folder / "attempts"
    attempts = int(path.read_text()) + 1 if path.exists() else 1
    path.write_text(str(attempts))
    if attempts < int(argument):
        raise ConnectionError(f"attempt {attempts}")
    return float(attempts)


def _hang_with_child(argument: str, folder: Path) -> float:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    (folder / "child").write_text(str(child.pid))
    while True:
        pass


def _fork_and_exit(argument: str, folder: Path) -> float:
    """The grandchild keeps the pipe open."""
    if os.fork() == 0:
        time.sleep(30)
    os._exit(0)


def _answer(argument: str, folder: Path) -> float:
    """This process's next two answers are the argument."""
    left, honest = [ast.literal_eval(argument)] * 2, RewardHandler.answer
    RewardHandler.answer = lambda *arguments: left.pop() if left else honest(*arguments)  # type: ignore[method-assign]
    return 0.0


def _print(argument: str, folder: Path) -> float:
    for _ in range(200):
        print("x" * 10_000)  # noqa: T201
        os.write(1, b"y" * 10_000)
    print(argument, file=sys.stderr)  # noqa: T201
    raise KeyError("after printing")


_ACTIONS = {
    "value": lambda argument, folder: float(argument),
    "nan_part": lambda argument, folder: Reward(1.0, {"p": float("nan")}),
    "none": lambda argument, folder: None,
    "text": lambda argument, folder: "1.0",
    "list_parts": lambda argument, folder: Reward(1.0, ["p"]),  # type: ignore[arg-type]
    "pid": lambda argument, folder: float(os.getpid()),
    "torch": lambda argument, folder: float("torch" in sys.modules),
    "main": lambda argument, folder: float(getattr(sys.modules["__main__"], "__file__", None) is not None),
    "raise": lambda argument, folder: [].pop(),
    "os_exit": lambda argument, folder: os._exit(int(argument)),
    "sys_exit": lambda argument, folder: sys.exit(int(argument)),
    "kill": lambda argument, folder: os.kill(os.getpid(), signal.SIGKILL),
    "sleep": _sleep,
    "count": _count,
    "hang_with_child": _hang_with_child,
    "fork_and_exit": _fork_and_exit,
    "print": _print,
    "answer": _answer,
}
