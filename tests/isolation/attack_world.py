"""What attacks aim at, and how their harm is seen from outside. Also a script: all attacks in one set-up.

`python tests/isolation/attack_world.py sandlock [plain|user|container|container-user]` prints what got through.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from roll.isolation.sandbox.base import Limits, Program, SandboxError
from roll.isolation.sandbox.local import LocalSandbox
from roll.isolation.sandbox.open_sandbox import open_sandbox

REPOSITORY = Path(__file__).parents[2]
LIMITS = Limits(
    wall_s=1.0, cpu_s=1.0, memory_mb=192, processes=8, open_files=32, file_mb=4, output_bytes=16_384
)  # fmt: skip
_SYSV_KEY = str(0x726F6C6C)

CANARY = """
import builtins, json, math, os, re, signal, sys, threading, unittest
assert os.listdir('.') == [], os.listdir('.')
assert os.listdir('..') == [os.path.basename(os.getcwd())], os.listdir('..')
assert os.getcwd() == os.environ['HOME'] and len(os.environ) < 12, os.environ
assert len('ab') == 2 and json.loads('[1]') == [1] and math.sqrt(4) == 2 and re.match('a', 'a')
assert unittest.TestCase.assertEqual.__module__ == 'unittest.case'
assert not any(type(finder).__name__ == 'Finder' for finder in sys.meta_path) and sys.gettrace() is None
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and not signal.pthread_sigmask(signal.SIG_BLOCK, [])
assert threading.active_count() == 1 and os.umask(0) != 0o777 and sys.getrecursionlimit() < 10_000
open('left', 'w').write('x')
print('fresh', sys.stdin.read())
"""
"""Runs after every attack in the same warm parent: nothing of the attack has reached it."""


@dataclass(frozen=True)
class Attack:
    """One row of attacks.txt."""

    name: str
    harm: str
    source: str


def read_attacks() -> list[Attack]:
    """Return the table."""
    text = (Path(__file__).parent / "attacks.txt").read_text(encoding="utf-8")
    attacks = []
    for part in text.split("\n### ")[1:]:
        title, _, source = part.partition("\n")
        name, _, harm = title.partition(": ")
        attacks.append(Attack(name, harm, source))
    return attacks


class World:
    """A secret, a file, listeners and a process, each of its own for every attack."""

    def __init__(self, *, alone: bool) -> None:
        self.secret = secrets.token_hex(12)
        self.mark = "roll-mark-" + secrets.token_hex(6)
        self.folder = tempfile.mkdtemp(prefix="roll-world-")
        Path(self.folder, "secret.txt").write_text(self.secret, encoding="utf-8")
        Path(self.folder, "victim.txt").write_text("untouched", encoding="utf-8")
        self._tcp = socket.create_server(("127.0.0.1", 0))
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind(("127.0.0.1", 0))
        self._unix, self._abstract = (socket.socket(socket.AF_UNIX) for _ in range(2))
        self._unix.bind(f"{self.folder}/socket")
        self._abstract.bind(f"\0{self.mark}")
        self._sockets = (self._tcp, self._udp, self._unix, self._abstract)
        for listener in (self._unix, self._abstract):
            listener.listen()
        for listener in self._sockets:
            listener.setblocking(False)
        self._victim = subprocess.Popen(["sleep", "300"], env={**os.environ, "ROLL_SECRET": self.secret})
        self._wait_for_victim()
        self._places = {
            "SECRET": self.secret,
            "SECRET_FILE": f"{self.folder}/secret.txt",
            "VICTIM_FILE": f"{self.folder}/victim.txt",
            "OUTSIDE": self.folder,
            "REPOSITORY": str(REPOSITORY),
            "MARK": self.mark,
            "VICTIM": str(self._victim.pid),
            "CALLER": str(os.getpid()),
            "ALONE": str(alone),
            "TCP": str(self._tcp.getsockname()[1]),
            "UDP": str(self._udp.getsockname()[1]),
            "UNIX": f"{self.folder}/socket",
            "ABSTRACT": self.mark,
            "NUL": "\0",
        }
        self._before = self._files()
        self._priority = os.getpriority(os.PRIO_PROCESS, self._victim.pid)
        self._cores = os.sched_getaffinity(self._victim.pid)

    def _wait_for_victim(self) -> None:
        """Wait until it sleeps: on a loaded machine a short attack ends before it has begun, which looks like harm."""
        deadline = time.monotonic() + 60
        while not re.search("Name:\tsleep\n(.*\n)*State:\tS", _read(f"/proc/{self._victim.pid}/status")):
            assert time.monotonic() < deadline, "the victim doesn't start to sleep"
            time.sleep(0.001)

    def source(self, attack: Attack) -> str:
        """Return the program, with the names of this world."""
        source = attack.source
        for name, value in self._places.items():
            source = source.replace(f"@{name}@", value)
        return source

    def harms(self) -> Iterator[str]:
        """Yield what has happened to it."""
        if self._files() != self._before:
            yield "a file outside was changed"
        for kind, listener in zip(("TCP", "UDP", "unix", "abstract"), self._sockets, strict=True):
            with contextlib.suppress(BlockingIOError):
                listener.recv(10) if kind == "UDP" else listener.accept()[0].close()
                yield f"the {kind} socket was reached"
        status = _read(f"/proc/{self._victim.pid}/status")
        if self._victim.poll() is not None or "State:\tS" not in status or "TracerPid:\t0" not in status:
            yield "the victim was hurt"
        elif (os.getpriority(os.PRIO_PROCESS, self._victim.pid), os.sched_getaffinity(self._victim.pid)) != (
            self._priority, self._cores,
        ):  # fmt: skip
            yield "the victim's priority was changed"
        places = ("/tmp", "/var/tmp", "/dev/shm", "/run", os.path.dirname(os.__file__))
        if any(glob.glob(f"{place}/*{self.mark}*") for place in places):
            yield "something was left behind"
        for kind in ("shm", "msg", "sem"):
            if any(line.split()[:1] == [_SYSV_KEY] for line in _read(f"/proc/sysvipc/{kind}").splitlines()):
                yield f"a System V {kind} was left behind"

    def _files(self) -> list[tuple[object, ...]]:
        rows = []
        for entry in sorted(os.scandir(self.folder), key=lambda entry: entry.name):
            stat = entry.stat(follow_symlinks=False)
            content = Path(entry.path).read_text(encoding="utf-8") if entry.is_file() else ""
            attributes = tuple(os.listxattr(entry.path, follow_symlinks=False))
            rows.append((entry.name, stat.st_mode, stat.st_uid, stat.st_nlink, stat.st_mtime_ns, content, attributes))
        return [(os.stat(self.folder).st_mode, os.stat(self.folder).st_uid), *rows]

    def close(self) -> None:
        """Take it down."""
        self._victim.kill()
        self._victim.wait()
        for listener in self._sockets:
            listener.close()
        os.chmod(self.folder, 0o700)
        shutil.rmtree(self.folder)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def survivors(folder: str) -> list[str]:
    """Return the processes that are in a program's folder."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                place = os.readlink(f"/proc/{name}/cwd")
                if place.startswith(folder) and "/home/" in place[len(folder) :]:
                    found.append(name)
    return found


def harms_of(
    attack: Attack, sandbox: LocalSandbox, *, slack_s: float, alone: bool, limits: Limits = LIMITS
) -> list[str]:
    """Run an attack and a canary after it; return everything that shouldn't have happened."""
    world = World(alone=alone)
    pipe = os.pipe()
    for end in pipe:
        os.set_inheritable(end, True)
    try:
        os.set_blocking(pipe[0], False)
        stdin = b"x" * 1_000_000 if attack.name == "never_reads_its_input" else b""
        try:
            outcome = sandbox.run(Program(source=world.source(attack), stdin=stdin), limits)
        except SandboxError as error:
            return [f"the sandbox failed: {error}"]
        printed = outcome.stdout + outcome.stderr
        found = list(world.harms())
        with contextlib.suppress(BlockingIOError):
            os.read(pipe[0], 1)
            found.append("a descriptor of the caller was written to")
        if world.secret.encode() in printed:
            found.append("it knows the secret")
        if b"BREACH" in outcome.stdout:  # not in its errors: a traceback shows the source
            found.append(f"it got what it wanted: {outcome.stdout[:200]!r}")
        if len(outcome.stdout) > limits.output_bytes or len(outcome.stderr) > limits.output_bytes:
            found.append("more output than allowed")
        if outcome.seconds > limits.wall_s + slack_s:  # without the start of a warm parent, which may come first
            found.append(f"it took {outcome.seconds:.1f} s")
        if left := survivors(sandbox.folder):
            found.append(f"processes {left} are left")
        try:
            canary = sandbox.run(
                Program(source=CANARY, stdin=b"input"), Limits(wall_s=20.0, processes=limits.processes)
            )
        except SandboxError as error:
            return [*found, f"the next program failed: {error}"]
        if canary.stdout != b"fresh input\n":
            found.append(f"the next program was changed: {canary.stderr[-300:]!r}")
        return found
    finally:
        for end in pipe:
            os.close(end)
        world.close()


def campaign(
    mechanism: str, attacks: Sequence[Attack], *, threads: int, slack_s: float, alone: bool = False
) -> dict[str, list[str]]:
    """Run attacks in several threads, each with a sandbox of its own; return harms by name."""
    local = threading.local()
    sandboxes: list[LocalSandbox] = []

    def run(attack: Attack) -> list[str]:
        if not hasattr(local, "sandbox"):
            local.sandbox = LocalSandbox(mechanism, parallel=1)
            sandboxes.append(local.sandbox)
        return harms_of(attack, local.sandbox, slack_s=slack_s, alone=alone)

    try:
        with ThreadPoolExecutor(threads) as pool:
            return {attack.name: harms for attack, harms in zip(attacks, pool.map(run, attacks), strict=True) if harms}
    finally:
        for sandbox in sandboxes:
            sandbox.close()


if __name__ == "__main__":
    import sys

    from attack_setups import enter

    enter(sys.argv[2] if len(sys.argv) > 2 else "plain")
    open_sandbox(sys.argv[1]).close()
    start = time.monotonic()
    rows = [attack for attack in read_attacks() if not sys.argv[3:] or attack.name in sys.argv[3:]]
    got_through = campaign(sys.argv[1], rows, threads=4, slack_s=5.0, alone=True)
    for name, harms in got_through.items():
        sys.stdout.write(f"{name} {harms}\n")
    sys.stdout.write(f"{len(rows)} attacks, {len(got_through)} did harm, {time.monotonic() - start:.1f} s\n")
    sys.exit(bool(got_through))
