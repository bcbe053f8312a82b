"""The actor around one worker: redirects its output, builds it, runs its calls, turns exceptions into data.

Imported before the worker's own code, and by design without torch: the environment is complete by then.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.distributed.worker import machine_id
from roll.distributed.worker_errors import Failure
from roll.utils.importing import OwnFiles, keep_imports, long_imports
from roll.utils.logging import setup_logging

STACKS_SIGNAL = signal.SIGUSR2
"""Makes a worker write the stacks of its threads to its log."""


@dataclass(frozen=True, slots=True)
class Home:
    """Where a worker's process runs."""

    node: str
    """Address of the machine, reachable by the others."""
    host: str
    pid: int
    machine: str
    """Ray's id of it; names may be the same on several."""


class WorkerShell:
    """One Ray actor, one process, one worker."""

    def __init__(self, name: str, log_file: Path, folder: str = "") -> None:
        """Write to `log_file`, and work in `folder`, from which the configuration's relative paths are seen, if this
        machine has it."""
        self._worker: Any = None
        keep_imports()
        if folder and os.path.isdir(folder):
            os.chdir(folder)
        _redirect(log_file)
        setup_logging(name=name)
        faulthandler.register(STACKS_SIGNAL, all_threads=True)

    def home(self) -> Home:
        """Return where this process runs."""
        import ray

        return Home(ray.util.get_node_ip_address(), socket.gethostname(), os.getpid(), machine_id())

    def reserve_port(self, host: str) -> int:
        """Hold a port for the process group that this rank will lead."""
        from roll.distributed.process_group import reserve_port

        return reserve_port(host)

    def build(self, env: dict[str, str], own_files: dict[str, str], packed: bytes) -> Failure | None:
        """Make the worker from the pickle of `(worker class, info, its further arguments)`.

        The environment comes first, for the pickle imports libraries. It may have objects of the user's files.
        """
        os.environ.update(env)
        if int(env["WORLD_SIZE"]) > 1 and (interface := interface_to(env["MASTER_ADDR"])):
            # By itself gloo takes the address of this machine's name, which /etc/hosts often says is 127.0.1.1.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        sys.meta_path.append(OwnFiles(own_files))
        try:
            with long_imports():
                worker_cls, info, init_args = pickle.loads(packed)
            self._worker = worker_cls(info, *init_args)
            if "torch.distributed" in sys.modules:
                from roll.distributed.process_group import limit_collectives

                limit_collectives(info.timeout)  # the start had longer; also in groups that libraries have made
        except Exception as error:  # noqa: BLE001 - attributed to the worker by the controller
            return Failure.of(error)
        return None

    def invoke(self, name: str, args: tuple[Any, ...], context: Any = None) -> Any:
        """Return the result of the worker's method, or the `Failure` it ended with."""
        try:
            return self._worker.invoke(name, args, context)
        except Exception as error:  # noqa: BLE001 - attributed to the worker by the controller
            return Failure.of(error)

    def close(self) -> None:
        """Let the worker clean up before its process is killed."""
        if self._worker is not None:
            self._worker.close()


def interface_to(address: str) -> str | None:
    """Return the name of the network interface by which this machine reaches an address; None if that can't be told."""
    try:
        family, *_, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            mine = probe.getsockname()[0]
    except OSError:
        return None
    import psutil

    names = psutil.net_if_addrs().items()
    return next(
        (name for name, addresses in names if any(each.address.partition("%")[0] == mine for each in addresses)), None
    )


def _redirect(log_file: Path) -> None:
    """Send everything this process prints, native code included, to one file."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    try:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(log_file, flags, 0o644)
    except OSError:  # of a machine that hasn't the controller's disk, or may not write to it
        fd = os.open(Path(tempfile.gettempdir()) / f"roll-{os.getpid()}-{log_file.name}", flags, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
