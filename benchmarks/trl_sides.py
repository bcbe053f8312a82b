"""The processes that `grpo_vs_trl.py` compares: started, told to take steps, and measured from outside."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import tempfile
import threading
import time
from dataclasses import asdict
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import psutil
from trl_task import Task

HERE = Path(__file__).resolve().parent
START_SECONDS = 300.0
STEP_SECONDS = 900.0


def environment(threads: int) -> dict[str, str]:
    """Return what both sides start with."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def tree(pid: int) -> list[psutil.Process]:
    """Return a process and all below it; none if it has ended."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def processor_seconds(pid: int) -> tuple[float, float]:
    """Return seconds (of the programs, of the kernel for them) of all processes of a side, with those that ended."""
    user = system = 0.0
    for process in tree(pid):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        user += times.user + times.children_user
        system += times.system + times.children_system
    return user, system


def proportional_memory(pid: int) -> int:
    """Return bytes of all processes of a side; what several share, counts once (PSS)."""
    total = 0
    for process in tree(pid):
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


class PeakMemory:
    """The most memory that a side was seen to have while this was entered."""

    def __init__(self, pid: int, every: float) -> None:
        self._pid, self._every = pid, every
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.most = 0

    def _watch(self) -> None:
        while not self._over.wait(self._every):
            self.most = max(self.most, proportional_memory(self._pid))

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


class Side:
    """A process that takes steps when told to. It has started once this is made."""

    def __init__(self, name: str, python: str, script: str, task: Task, folder: Path, extra: list[str]) -> None:
        self.name = name
        address = str(folder / f"{name}.socket")
        command = [python, str(HERE / script), "--folder", str(folder), "--address", address]
        self._log = (folder / f"{name}.log").open("w+")
        begun = time.perf_counter()
        with Listener(address, family="AF_UNIX") as listener:
            self._process = subprocess.Popen(
                [*command, "--task", json.dumps(asdict(task)), *extra],
                env=environment(task.threads),
                stdout=self._log,
                stderr=subprocess.STDOUT,
            )
            # While it starts nothing is timed, so that looking often does no harm.
            with PeakMemory(self._process.pid, 0.1) as memory:
                self._connection: Connection = self._accept(listener)
                self.threads = self._answer(START_SECONDS)["threads"]
        self.peak_memory = memory.most
        self.ready_seconds = time.perf_counter() - begun

    def _accept(self, listener: Listener) -> Connection:
        listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
        for _ in range(int(START_SECONDS)):
            if self._process.poll() is not None:
                break
            try:
                return listener.accept()
            except TimeoutError:
                continue
        raise RuntimeError(self._failure(f"{self.name} didn't start"))

    def _answer(self, timeout: float) -> dict[str, Any]:
        waited = 0.0
        while not self._connection.poll(1.0):
            waited += 1.0
            if self._process.poll() is not None or waited > timeout:
                raise RuntimeError(self._failure(f"{self.name} gave no answer in {waited:.0f} s"))
        try:
            answer: dict[str, Any] = self._connection.recv()
        except EOFError:
            raise RuntimeError(self._failure(f"{self.name} ended")) from None
        return answer

    def _failure(self, what: str) -> str:
        self._log.seek(0)
        return f"{what}; the end of its output:\n{self._log.read()[-3000:]}"

    def ask(self, command: str) -> dict[str, Any]:
        """Send a command and return its figures."""
        self._connection.send(command)
        return self._answer(STEP_SECONDS)

    def step(self) -> dict[str, Any]:
        """Have it take a step: its own figures, with processor seconds of all its processes."""
        before = processor_seconds(self._process.pid)
        figures = self.ask("step")
        user, system = (now - then for now, then in zip(processor_seconds(self._process.pid), before, strict=True))
        return {**figures, "processor": user + system, "kernel": system}

    def watched_step(self) -> None:
        """Have it take a step that nobody times, and add to its peak of memory what it takes."""
        with PeakMemory(self._process.pid, 0.02) as memory:
            self.ask("step")
        self.peak_memory = max(self.peak_memory, memory.most)

    def close(self) -> None:
        """End the process."""
        try:
            self._connection.send("stop")
            self._process.wait(30)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._log.close()


def seconds_to(command: list[str], threads: int, last: str = "first token") -> dict[str, float]:
    """Run a command in a terminal until it has noted `last` in the file that {notes} stands for; return when what was.

    `first line` is when it has written anything.
    """
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        ours, theirs = pty.openpty()
        begun = time.monotonic()
        process = subprocess.Popen(
            [word.replace("{notes}", str(notes)) for word in command],
            env={**environment(threads), "TERM": "dumb"},
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        happened: dict[str, float] = {}
        printed = bytearray()
        reader = threading.Thread(target=_read, args=(ours, begun, happened, printed), daemon=True)
        reader.start()
        try:
            while last not in happened:
                if process.poll() is not None or time.monotonic() - begun > START_SECONDS:
                    raise RuntimeError(f"{command} never had a {last}; it printed:\n{printed.decode()[-3000:]}")
                time.sleep(0.02)
                if notes.is_file():
                    for name, at in map(json.loads, reversed(notes.read_text().splitlines())):
                        happened[name] = at - begun
        finally:
            for member in tree(process.pid):
                member.kill()
            process.wait()
            reader.join(5)
            os.close(ours)
    return happened


def _read(terminal: int, begun: float, happened: dict[str, float], printed: bytearray) -> None:
    while True:
        try:
            data = os.read(terminal, 4096)
        except OSError:  # the other end is closed
            return
        if not data:
            return
        happened.setdefault("first line", time.monotonic() - begun)
        printed.extend(data)


VERSIONS = """
import importlib.metadata as metadata, json, platform
names = ("torch", "transformers", "datasets", "accelerate", "trl")
there = {name: metadata.version(name) for name in names if next(metadata.distributions(name=name), None)}
print(json.dumps({"python": platform.python_version(), **there}))
"""


def versions(python: str) -> dict[str, str]:
    """Return those of an environment's packages."""
    done = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True)
    result: dict[str, str] = json.loads(done.stdout)
    return result


def machine() -> dict[str, Any]:
    """Return what figures depend on: processor, memory, kernel, and what else runs."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    features = set(fields.get("flags", "").split())
    named = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "processor": fields.get("model name", "unknown"),
        "family, model, stepping": ", ".join(fields.get(name, "?") for name in ("cpu family", "model", "stepping")),
        "features": [name for name in named if name in features],
        "cores": len(os.sched_getaffinity(0)),
        "memory GiB": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": os.uname().release,
        "huge pages": pages.read_text().strip() if pages.is_file() else "unknown",
        "load before": [round(load, 2) for load in os.getloadavg()],
        "begun": time.strftime("%Y-%m-%d %H:%M"),
    }
