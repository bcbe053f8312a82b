"""Machines of a test: network namespaces with an address, a host name, a home, a /tmp/ray and a disk of their own.

They share this machine's root file system (the interpreter, this repository) and, if they are told to, one folder more.
Killing a machine's process 1 is its power being cut; taking its port off the bridge is its cable being pulled.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
_TRIES = 5
_SET_UP = """
set -e
mount --make-rprivate /
hostname {host}
mkdir -p /tmp/ray
mount --bind {disk}/ray /tmp/ray
mount -t tmpfs -o size=512m tmpfs /dev/shm
[ "{shared}" = True ] || mount --bind {disk}/work {work}
printf '127.0.0.1 localhost\\n127.0.1.1 {host}\\n' > {disk}/hosts
mount --bind {disk}/hosts /etc/hosts
touch {disk}/ready
exec sleep infinity
"""


def why_not() -> str:
    """Return why no machines can be made here; empty: they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if missing := [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]:
        return f"there is no {', '.join(missing)}"
    name = f"rollprobe{os.getpid()}"
    if _run(["ip", "netns", "add", name], check=False).returncode:
        return "network namespaces can't be made here"
    bridge = _run(["ip", "-n", name, "link", "add", "br0", "type", "bridge"], check=False).returncode
    _run(["ip", "netns", "del", name])
    return "the kernel has no bridges" if bridge else ""


class Machine:
    """One of them, of the network `net`."""

    def __init__(self, number: int, net: str, base: Path, *, shared: bool) -> None:
        self.host, self.address = f"machine{number}", f"10.77.0.{number + 1}"
        self.work = base / "work"
        """The working folder, under one path on all machines; on a disk of each machine's own unless it is shared."""
        self._net, self._port, self._namespace = net, f"p{number}", f"{net}m{number}"
        disk = base / self.host
        self.home = disk / "home"
        for name in ("ray", "work", "home"):
            (disk / name).mkdir(parents=True)
        self.disk = self.work if shared else disk / "work"
        """Where this process sees its working folder."""
        self._environment = {"HOME": str(self.home)}
        _run(["ip", "netns", "add", self._namespace])
        link = ["ip", "-n", net, "link"]
        _run([*link, "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", self._namespace])
        _run([*link, "set", self._port, "master", "br0", "up"])
        _run(["ip", "-n", self._namespace, "addr", "add", f"{self.address}/24", "dev", "eth0"])
        for interface in ("lo", "eth0"):
            _run(["ip", "-n", self._namespace, "link", "set", interface, "up"])
        script = _SET_UP.format(host=self.host, disk=disk, work=self.work, shared=shared)
        first = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._first = subprocess.Popen(["ip", "netns", "exec", self._namespace, *first, "bash", "-c", script])
        wait_until(lambda: (disk / "ready").exists(), 20, f"{self.host} to be set up")
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text().split()
        self._pid = children[0]

    def command(self, *words: str, folder: Path | None = None, **environment: str | None) -> list[str]:
        """Return the command line that runs `words` on this machine, in its working folder; None unsets a variable."""
        changes = {**self._environment, **environment}
        settings = [f"{name}={value}" for name, value in changes.items() if value is not None]
        unset = [word for name, value in changes.items() if value is None for word in ("-u", name)]
        script = f"cd {shlex.quote(str(folder or self.work))} && exec {shlex.join(['env', *unset, *settings, *words])}"
        return ["nsenter", "--target", self._pid, "--all", "bash", "-c", script]

    def run(self, *words: str, timeout: float = 300, **options: object) -> subprocess.CompletedProcess[str]:
        """Run a command there to its end; stdout and stderr are one text."""
        command = self.command(*words, **options)  # type: ignore[arg-type]
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, env=_environ()
        )

    def start(self, *words: str, output: Path, **options: object) -> subprocess.Popen[bytes]:
        """Start a command there whose output goes to a file."""
        with open(output, "wb") as file:
            command = self.command(*words, **options)  # type: ignore[arg-type]
            return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=_environ())

    def cut(self, *, down: bool = True) -> None:
        """Pull the network's cable, or plug it in again."""
        _run(["ip", "-n", self._net, "link", "set", self._port, "down" if down else "up"])

    def stop(self) -> None:
        """Cut the power."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(self._pid), signal.SIGKILL)
        self._first.wait(timeout=20)
        _run(["ip", "netns", "del", self._namespace], check=False)


@contextlib.contextmanager
def machines(count: int, *, shared: bool) -> Iterator[list[Machine]]:
    """Yield machines on one network; `shared`: their working folder is one, as on NFS."""
    base = Path(tempfile.mkdtemp(prefix="rm-", dir="/tmp"))
    (base / "work").mkdir()
    net = f"rollnet{os.getpid()}"
    started: list[Machine] = []
    _run(["ip", "netns", "add", net])
    try:
        _run(["ip", "-n", net, "link", "add", "br0", "type", "bridge"])
        _run(["ip", "-n", net, "link", "set", "br0", "up"])
        for number in range(count):
            started.append(Machine(number, net, base, shared=shared))
        yield started
    finally:
        for machine in started:
            machine.stop()
        _run(["ip", "netns", "del", net], check=False)
        shutil.rmtree(base, ignore_errors=True)


def start_ray(
    head: Machine, *others: Machine, gpus: int = 1, dashboard: bool = False, **environment: str | None
) -> str:
    """Start Ray by hand as docs/cluster.md says, with made-up devices on the others; return what was printed."""
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats"]
    memory = [f"--object-store-memory={100 << 20}"]
    printed = ""
    for machine in (head, *others):
        where = ["--head", "--port=6379", f"--include-dashboard={str(dashboard).lower()}"]
        where = where if machine is head else [f"--address={head.address}:6379"]
        devices = "--num-gpus=0" if machine is head else f"--num-gpus={gpus}"
        options = [f"--node-ip-address={machine.address}", "--num-cpus=2", devices]
        for _ in range(_TRIES):  # Ray gives a node 30 seconds to start, which are few where others share the cores
            done = machine.run(*ray, *where, *options, *memory, **environment)
            if "timed out during startup" not in done.stdout:
                break
            machine.run(*ray[:-2], "stop", "--force")  # sees the processes of that machine alone
        printed += done.stdout
        if done.returncode:
            raise RuntimeError(f"ray start on {machine.host}: {done.stdout}")
    return printed


def roll(machine: Machine, *words: str, timeout: float = 600, **options: object) -> tuple[int, str, float]:
    """Run the command line there; return exit status, output and seconds."""
    begun = time.monotonic()
    done = machine.run(sys.executable, "-m", "roll.cli", *words, timeout=timeout, **options)
    return done.returncode, done.stdout, time.monotonic() - begun


def wait_until(is_done: object, seconds: float, what: str) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not is_done():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(0.1)


def last_rows(file: Path) -> list[dict[str, object]]:
    """Return the rows of a JSON lines file that may be under way."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def _environ() -> Mapping[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTEST_"))}
    paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")])
    return {**kept, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_worker_niceness": "0"}


def _run(command: list[str], *, check: bool = True) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, check=check, capture_output=True)
