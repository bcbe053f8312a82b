"""A Ray cluster of this run's own: private folder, ports and namespace, gone when the run is."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from roll.distributed.rank_parent import RankParent, rank_variables
from roll.distributed.ray_auth import agree_on_tokens, find_cluster, restore, use_private_token
from roll.distributed.ray_reaper import MARK, start_reaper

logger = logging.getLogger(__name__)
_PREFIX = "roll-ray-"
_REPORT_SECONDS = 1.5
"""Processes report what they have done every second."""
_LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Says, on any system, that a cluster may have several machines. Without it Ray's seven ports listen on loopback only,
where other users of this machine reach them: see `use_private_token`. (An address of loopback that is given to
`ray.init` is replaced.)"""
_before: dict[str, str | None] = {}
"""Ray's variables about tokens as they were before `connect`."""
_OF_RAY = "r"
"""Ray's own folder in the private one: Ray opens the one that it is given to every user."""
_LONGEST_ROOT = 22  # Ray's socket paths add up to 84 characters, and a Unix socket's path may have 107


def connect(address: str | None, temp: Path, options: Mapping[str, int] | None = None) -> None:
    """Connect this process to Ray: join the cluster at `address` (`auto`, `host:port`), or start one in `temp`.

    One that is started has these further `options` of `ray.init`. Ends with `disconnect`. Raises `ClusterError` where
    no cluster can be joined.
    """
    _set_variables(own=address is None)
    with _same_sigterm():
        _connect(address, temp, options or {})


def _set_variables(*, own: bool) -> None:
    """Set what Ray reads when it is imported. Nothing of a run is reported to anybody."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ[_LOOPBACK_ONLY] = "0" if own else "1"  # Ray's processes read it


def disconnect() -> None:
    """Leave Ray; the last process that does ends a cluster of our own."""
    import ray

    _kill_monitor()
    ray.shutdown()
    restore(_before)
    _before.clear()


def _kill_monitor() -> None:
    """Kill the process of a Ray of our own that would ask for more machines: Ray asks it to end, and waits a second for
    it in vain."""
    import psutil

    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if any(word.endswith("autoscaler/_private/monitor.py") for word in child.cmdline()):
                child.kill()


@contextlib.contextmanager
def _same_sigterm() -> Iterator[None]:
    """Keep what SIGTERM does: Ray takes it over, and prints a C++ stack then."""
    if threading.current_thread() is not threading.main_thread():
        yield  # nor can Ray change it here
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _connect(address: str | None, temp: Path, options: Mapping[str, int]) -> None:
    import ray
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = address is not None  # its value where Ray had been imported before
    if ray.is_initialized():
        raise RuntimeError(
            "this process is connected to Ray already, and can be to one cluster at a time; executor: ray starts one "
            "itself, or joins that of `ray start` (num_nodes > 1): call ray.shutdown() before"
        )
    if address is not None:
        # Not "auto", with which Ray goes by the token file of the home, whatever the cluster was started with.
        address = find_cluster(address)
    if not _before:
        _before.update(use_private_token(temp) if address is None else agree_on_tokens(address))
    try:
        _init(address, temp, options)
    except BaseException:
        restore(_before)
        _before.clear()
        raise


def _init(address: str | None, temp: Path, options: Mapping[str, int]) -> None:
    import ray

    own: dict[str, Any] = {
        **options,
        "include_dashboard": False,
        "_temp_dir": str(temp / _OF_RAY),
        # Workers get an environment of their own, so processes started in advance would idle for ever.
        "_system_config": {"prestart_worker_first_driver": False},
    }
    ray.init(
        # "local" keeps RAY_ADDRESS and clusters that others left running on this machine out of the choice.
        address="local" if address is None else address,
        namespace=temp.name,
        log_to_driver=False,
        logging_level=logging.ERROR,
        **(own if address is None else {}),
    )


class RaySession:
    """What this process has around its connection to Ray, and ends: a private folder, a reaper, ranks' warm parent."""

    def __init__(self, address: str | None, options: Mapping[str, int] | None = None) -> None:
        """Start nothing of Ray yet; see `connect` for the arguments."""
        self._address, self._options = address, dict(options or {})
        self._folder = PrivateFolder()
        self.path = self._folder.path
        self._reaper = start_reaper(self.path) if address is None and sys.platform == "linux" else None
        os.environ[MARK] = str(self.path)
        self.rank_parent: RankParent | None = None
        self._connected = False

    def start_rank_parent(self, modules: Sequence[str], variables: Mapping[str, str]) -> None:
        """Start a warm parent of ranks that import these modules and have these variables, without waiting for it."""
        _set_variables(own=self._address is None)
        import ray  # noqa: F401 - it adds to the path that ranks are given

        _before.update(use_private_token(self.path))
        self.rank_parent = RankParent(self.path, modules, {**os.environ, **rank_variables(), **variables})

    def connect(self) -> None:
        """Be connected to Ray; raises what `connect` raises, and is over then."""
        if self._connected:
            return
        try:
            connect(self._address, self.path, self._options)
        except BaseException:
            self._end()
            raise
        self._connected = True

    def close(self) -> None:
        """Disconnect from Ray, and end the session."""
        if self._connected:
            self._connected = False
            disconnect()
        elif _before:
            restore(_before)
            _before.clear()
        self._end()

    def _end(self) -> None:
        """End what isn't Ray's; a second call does nothing."""
        if self.rank_parent is not None:
            self.rank_parent.close()
        self._folder.remove()
        os.environ.pop(MARK, None)
        if self._reaper is not None:
            os.close(self._reaper)
            self._reaper = None


class _Early:
    """There is one process, hence one state."""

    session: RaySession | None = None


@contextlib.contextmanager
def begun_session(
    options: Mapping[str, int], modules: Sequence[str], variables: Mapping[str, str]
) -> Iterator[RaySession]:
    """Begin a Ray of this run's own inside the block, with a warm parent: `early_session` hands it over. It is ended
    where nobody has taken it."""
    session = _Early.session = RaySession(None, options)
    try:
        session.start_rank_parent(modules, variables)
        yield session
    finally:
        if early_session() is session:
            session.close()


def early_session() -> RaySession | None:
    """Return the session that was begun, once: it is the caller's from then on."""
    session, _Early.session = _Early.session, None
    return session


def save_timeline(path: Path) -> None:
    """Write what Ray knows of its processes' calls so far, in Chrome's trace format; what fails is named in the log."""
    import ray

    time.sleep(_REPORT_SECONDS)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        ray.timeline(str(path))
    except Exception as error:  # noqa: BLE001 - what shows a run must not end it
        logger.warning("profiler.ray_timeline: %s isn't written: %s", path, error)


class PrivateFolder:
    """A temporary folder of this process. A lock tells a living owner's folder from the litter of a killed one."""

    def __init__(self, root: Path | None = None) -> None:
        root = root or _short_root()
        _sweep(root)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        self._lock: IO[str] | None = open(self.path / "lock.new", "w")  # noqa: SIM115 - held until `remove`
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Only a locked file ever has the name that `_sweep` looks for.
        os.rename(self.path / "lock.new", self.path / "lock")

    def remove(self) -> None:
        """Delete the folder; a second call does nothing."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._lock.close()
            self._lock = None


def _short_root() -> Path:
    root = Path(tempfile.gettempdir())
    return root if len(str(root)) <= _LONGEST_ROOT else Path("/tmp")


def _sweep(root: Path) -> None:
    """Delete folders whose owner is gone."""
    for lock in root.glob(f"{_PREFIX}*/lock"):
        try:
            with open(lock, "r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            continue  # somebody's living folder, or another user's
