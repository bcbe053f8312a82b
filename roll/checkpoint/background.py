"""Checkpoints that are written while training goes on.

Every rank has a copy of its part in memory, and a thread that writes, flushes and hashes it (`write_part`). A thread of
the controller (`BackgroundSave`) waits for all parts, and makes the folder a checkpoint. They talk through small files
in the unfinished folder, so that no call to a worker has to wait behind a training step.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from roll.checkpoint.files import (
    Checkpoint,
    CheckpointError,
    CheckpointWriteError,
    FileRecord,
    hash_files,
    read_json,
    read_manifest,
    write_json,
)
from roll.checkpoint.store import Unfinished
from roll.utils.disk import first_line

_PARTS = ".parts"
_RESERVE = 1 << 16
"""Bytes that a rank holds on the disk until it has told what it wrote: a full one couldn't be told otherwise."""
_POLL_SECONDS = 0.05
STALLED_SECONDS = 60.0
"""How long nothing may be written after a failure of the run before its last checkpoint is given up."""


def write_part(folder: Path, name: str, write: Callable[[], Iterable[Path]]) -> threading.Thread:
    """Have a thread write a rank's part of the checkpoint in `folder`; `write` yields each file that is complete."""

    def run() -> None:
        files: dict[str, FileRecord] = {}
        error = ""
        parts = folder / _PARTS
        reserve = parts / f"{name}.reserve"
        try:
            parts.mkdir(exist_ok=True)
            reserve.write_bytes(bytes(_RESERVE))
            for path in write():
                files.update(hash_files(folder, [path.relative_to(folder).as_posix()], flush=True))
        except Exception as failure:  # noqa: BLE001 - told to the controller, which raises it
            error = first_line(failure) or type(failure).__name__
        reserve.unlink(missing_ok=True)
        write_json(parts / f"{name}.json", {"files": {k: asdict(v) for k, v in files.items()}, "error": error})

    thread = threading.Thread(target=run, name=f"checkpoint-{name}", daemon=True)
    thread.start()
    return thread


class BackgroundSave:
    """A checkpoint whose parts are being written.

    Args:
        unfinished: its folder; this object ends it.
        parts: names of the parts, as given to `write_part`.
        then: called with the complete checkpoint, in this object's thread; has a limit of its own.
    """

    def __init__(self, unfinished: Unfinished, parts: Sequence[str], then: Callable[[Checkpoint], None]) -> None:
        self.step = unfinished.step
        self.seconds = 0.0
        """From the copy in memory to the complete checkpoint."""
        self._unfinished, self._then = unfinished, then
        self._missing = list(parts)
        self._error: BaseException | None = None
        self._stopped = threading.Event()
        self._complete = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"checkpoint-{self.step}", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Return whether it ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, seconds: float, *, stalled: float | None = None) -> None:
        """Wait until it ended, `then` included; raise what went wrong.

        Raises `CheckpointWriteError` if it isn't complete after `seconds`, or if nothing was written for `stalled`
        seconds: it is given up.
        """
        deadline, last_change, before = time.monotonic() + seconds, time.monotonic(), -1
        while self._thread.is_alive():
            self._thread.join(_POLL_SECONDS)
            now = time.monotonic()
            if stalled is not None and (size := self._written()) != before:
                before, last_change = size, now
            stands_still = stalled is not None and now > last_change + stalled
            late = (now > deadline or stands_still) and not self._complete.is_set()
            if self._thread.is_alive() and late:
                self._stopped.set()
                limit = f"and stands still for {stalled:g} s" if stands_still else f"after {seconds:g} s (rpc_timeout)"
                waited = ", ".join(self._missing) or "the disk"
                raise CheckpointWriteError(
                    f"the checkpoint of step {self.step} isn't written {limit}: waiting for {waited}"
                )
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _written(self) -> int:
        """Bytes and files in the folder, as a number that changes while something is written."""
        try:
            return sum(
                1 + path.stat().st_size for path in (self._unfinished.folder, *self._unfinished.folder.rglob("*"))
            )
        except OSError:  # complete: what comes then has only the limit of all
            return -time.monotonic_ns()

    def _run(self) -> None:
        started = time.monotonic()
        try:
            with self._unfinished.attributed():
                records = dict(self._collected())
                self._unfinished.finish(records)
            self._complete.set()
            self.seconds = time.monotonic() - started
            self._then(read_manifest(self._unfinished.final))
        except BaseException as error:  # noqa: BLE001 - raised by `wait` in the controller's own thread
            self._error = error

    def _collected(self) -> Iterator[tuple[str, FileRecord]]:
        """Wait for every part; yield what it says of its files."""
        parts = self._unfinished.folder / _PARTS
        while self._missing:
            for name in [name for name in self._missing if (parts / f"{name}.json").is_file()]:
                content = read_json(parts / f"{name}.json")
                if content["error"]:
                    raise OSError(f"{name}: {content['error']}")
                yield from ((file, FileRecord(**record)) for file, record in content["files"].items())
                self._missing.remove(name)
            if self._stopped.wait(_POLL_SECONDS if self._missing else 0):
                raise CheckpointError(f"the checkpoint of step {self.step} was given up")
        shutil.rmtree(parts, ignore_errors=True)
