"""Checkpoints in a store that fsspec reaches (`s3://`, `gs://`, `hdfs://`, `file://`, ...), beside those on the disk.

    <url>/checkpoint-<step>/<files as on the disk>
    <url>/checkpoint-<step>/manifest.json       written last: without it an upload isn't a checkpoint

A checkpoint is uploaded once it is complete on the disk. One that is replaced or removed loses its manifest first, so
that a kill leaves at worst files that nobody takes for a checkpoint; the next upload removes them.
"""

from __future__ import annotations

import logging
import re
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from roll.checkpoint.best import LINK, Best, best_of
from roll.checkpoint.files import MANIFEST, Checkpoint, CheckpointError, parse_manifest
from roll.checkpoint.store import CheckpointStore, verify
from roll.utils.disk import first_line
from roll.utils.secrets import without_passwords

logger = logging.getLogger(__name__)

ATTEMPTS = 3
_PAUSE_SECONDS = 1.0  # before the second attempt; four times as much before each one after it
_NAME = re.compile(r"checkpoint-(\d+)")
T = TypeVar("T")
_here = threading.local()
"""`abandoned` of a thread of `_within`: set once nobody waits for it any more."""


class RemoteError(RuntimeError):
    """A remote store can't be reached, or an operation in it failed as often as it was tried."""


class _AbsentError(RemoteError):
    """A file isn't in the store."""


class RemoteCheckpoints:
    """The checkpoints below one URL. One run at a time writes there.

    Args:
        url: `protocol://path`; credentials come from where the protocol's package looks for them.
        max_to_keep: newest complete checkpoints that stay. None: all.
        seconds: limit for each operation on a whole checkpoint.
    """

    def __init__(self, url: str, max_to_keep: int | None = None, *, seconds: float = 3600.0) -> None:
        self.url = url.rstrip("/")
        self.shown = without_passwords(self.url, "***")
        """The URL without a password."""
        self._max_to_keep, self._seconds = max_to_keep, seconds
        self._fs, self._root = _connected(self.url)

    def complete(self) -> list[Checkpoint]:
        """Return the checkpoints that have a manifest, newest first; their paths are below a folder that isn't there.

        Raises `RemoteError` where the store doesn't answer.
        """
        return _within(self._seconds, self._complete, f"a list of {self.shown}")

    def upload(self, checkpoint: Checkpoint) -> None:
        """Copy a complete checkpoint, then remove the oldest. Raises `RemoteError`; what was there stays complete."""
        _within(
            self._seconds, lambda: self._upload(checkpoint), f"the upload of {checkpoint.path.name} to {self.shown}"
        )

    def download(self, checkpoint: Checkpoint, store: CheckpointStore) -> Checkpoint:
        """Copy one of `complete()` into a folder of checkpoints, and verify its hashes.

        Raises `CheckpointError` if it is damaged, `RemoteError` where the store doesn't answer; nothing is left then.
        """
        what = f"the download of checkpoint-{checkpoint.step} from {self.shown}"
        with store.arriving(checkpoint.step) as folder:
            _within(self._seconds, lambda: self._download(checkpoint, folder), what)
            verify(folder)
        return verify(store.root / f"checkpoint-{checkpoint.step}")

    def _complete(self) -> list[Checkpoint]:
        complete = []
        for name in self._named():
            if not self._has_manifest(name):
                continue
            try:
                complete.append(self._manifest(name))
            except CheckpointError as error:
                logger.warning("skipping %s/%s: %s", self.shown, name, error)
        return sorted(complete, key=lambda checkpoint: checkpoint.serial, reverse=True)

    def _manifest(self, name: str) -> Checkpoint:
        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder, name)
            local.mkdir()
            _tried(lambda: self._fs.get_file(self._path(name, MANIFEST), str(local / MANIFEST)))
            return parse_manifest(local)

    def _named(self) -> list[str]:
        """Return the names of folders that may be checkpoints."""
        self._fs.invalidate_cache()
        if not _tried(lambda: self._fs.isdir(self._root)):
            return []
        entries = _tried(lambda: self._fs.ls(self._root, detail=False))
        names = (str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in entries)
        return sorted(name for name in names if _NAME.fullmatch(name))

    def _upload(self, checkpoint: Checkpoint) -> None:
        name = f"checkpoint-{checkpoint.step}"
        self._remove(name)
        for file, record in checkpoint.files.items():
            source, target = checkpoint.path / file, self._path(name, file)
            _tried(partial(self._put, source, target))
            size = _tried(partial(self._fs.size, target))
            if size != record.size:
                raise RemoteError(f"{target} has {size} bytes after its upload, expected {record.size}")
        _tried(lambda: self._put(checkpoint.path / MANIFEST, self._path(name, MANIFEST)))
        self._prune(name, best_of(checkpoint.meta))

    def _put(self, source: Path, target: str) -> None:
        self._fs.makedirs(target.rsplit("/", 1)[0], exist_ok=True)  # does nothing in stores without folders
        self._fs.put_file(str(source), target)

    def _prune(self, written: str, best: Best | None) -> None:
        """Remove what is beyond `max_to_keep` or left of an upload that was cut off, never what was just written, never
        the best."""
        complete = self._complete()
        keep = complete if self._max_to_keep is None else complete[: self._max_to_keep]
        retained = {written, *(f"checkpoint-{checkpoint.step}" for checkpoint in keep)}
        retained |= set() if best is None else {f"checkpoint-{best.step}"}
        unreadable = {name for name in self._named() if self._has_manifest(name)}
        unreadable -= {f"checkpoint-{checkpoint.step}" for checkpoint in complete}  # another version's, perhaps
        for name in set(self._named()) - retained - unreadable:
            try:
                self._remove(name)
            except RemoteError as error:
                logger.warning("couldn't remove the old checkpoint %s/%s: %s", self.shown, name, error)

    def _remove(self, name: str) -> None:
        if self._has_manifest(name):
            _tried(lambda: self._fs.rm_file(self._path(name, MANIFEST)))
        if _tried(lambda: self._fs.exists(self._path(name))):
            _tried(lambda: self._fs.rm(self._path(name), recursive=True))
        self._fs.invalidate_cache()

    def _download(self, checkpoint: Checkpoint, folder: Path) -> None:
        name = f"checkpoint-{checkpoint.step}"
        for file in (*checkpoint.files, MANIFEST):
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                _tried(partial(self._fs.get_file, self._path(name, file), str(target)))
            except _AbsentError as error:
                raise CheckpointError(f"{self.shown}/{name} is damaged: {error}") from error

    def _has_manifest(self, name: str) -> bool:
        return bool(_tried(lambda: self._fs.exists(self._path(name, MANIFEST))))

    def _path(self, *parts: str) -> str:
        return "/".join((self._root, *parts))


def download(url: str, folder: Path, seconds: float) -> Checkpoint:
    """Copy the checkpoint at `url` into `folder` and verify it; one that is there already isn't copied again.

    Raises `CheckpointError` if there is none or it is damaged, `RemoteError` where the store doesn't answer.
    """
    parent, _, name = url.rstrip("/").rpartition("/")
    remote = RemoteCheckpoints(parent, seconds=seconds)
    complete = remote.complete()
    there = {f"checkpoint-{checkpoint.step}": checkpoint for checkpoint in complete}
    if name == LINK and complete and (best := best_of(complete[0].meta)) is not None:
        name = f"checkpoint-{best.step}"
    if name not in there:
        listing = ", ".join(sorted(there)) or "no checkpoint-<step>"
        raise CheckpointError(f"{remote.shown} holds {listing}; {name} isn't a complete checkpoint there")
    store = CheckpointStore(folder)
    for mine in store.complete():
        if mine.step == there[name].step and mine.files == there[name].files:
            return verify(mine.path)
    return remote.download(there[name], store)


def _connected(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{without_passwords(url, '***')}: {error}") from None
    except Exception as error:
        raise RemoteError(f"{without_passwords(url, '***')} can't be reached: {first_line(error)}") from error
    return fs, str(root).rstrip("/")


def _tried(operation: Callable[[], T]) -> T:
    """Return what an operation returns, tried again after a pause where it fails."""
    pause = _PAUSE_SECONDS
    abandoned: threading.Event | None = getattr(_here, "abandoned", None)
    for attempt in range(1, ATTEMPTS + 1):
        if abandoned is not None and abandoned.is_set():
            raise RemoteError("it was given up")
        try:
            return operation()
        except FileNotFoundError as error:
            raise _AbsentError(f"{first_line(error)} isn't there") from error
        except Exception as error:
            if attempt == ATTEMPTS:
                raise RemoteError(f"{type(error).__name__}: {first_line(error)} ({ATTEMPTS} attempts)") from error
            time.sleep(pause)
            pause *= 4
    raise AssertionError("the loop returns or raises")


def _within(seconds: float, operation: Callable[[], T], what: str) -> T:
    """Run an operation in a thread of its own, since no protocol's package promises to end; `RemoteError` if late.

    One that is late begins nothing further in the store, where the next upload may be at work.
    """
    result: list[T] = []
    failure: list[BaseException] = []

    abandoned = threading.Event()

    def run() -> None:
        _here.abandoned = abandoned
        try:
            result.append(operation())
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            failure.append(error)

    thread = threading.Thread(target=run, name="remote checkpoints", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        abandoned.set()
        raise RemoteError(f"{what} isn't done after {seconds:g} s (rpc_timeout)")
    if failure:
        if isinstance(failure[0], RemoteError):
            raise RemoteError(f"{what} failed: {failure[0]}") from failure[0]
        raise failure[0]
    return result[0]
