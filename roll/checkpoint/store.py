"""The folder of a run's checkpoints.

    store = CheckpointStore(root, max_to_keep=3)
    with store.writing(step, {"config": fingerprint}) as folder:
        actor.call(ActorTrain.save, folder)  # every rank writes its own files
        write_json(folder / "cursor.json", cursor)

    checkpoint = store.resolve("auto")  # None, or the newest complete one

A checkpoint is written into a hidden sibling, flushed, described by a manifest with the size and hash of every file,
and renamed to `checkpoint-<step>`. The rename is atomic: a kill at any point leaves the whole checkpoint or nothing of
it, and the ones before it untouched. What a killed writer left behind is removed by the next one.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roll.checkpoint.best import LINK, best_of, link_best, remove_dead_link, remove_unfinished_links
from roll.checkpoint.files import (
    MANIFEST,
    Checkpoint,
    CheckpointError,
    CheckpointWriteError,
    FileRecord,
    files_below,
    hash_files,
    read_manifest,
    sync_folder,
    verify,
    write_manifest,
)
from roll.utils.disk import first_line, free_space, is_disk_full
from roll.utils.locking import folder_lock
from roll.utils.umask import apply_umask

_logger = logging.getLogger(__name__)
_NAME = re.compile(r"checkpoint-(\d+)")
_OURS = re.compile(r"\.checkpoint-(\d+)\.[0-9a-f]{8}\.(writing|replaced|removed)")
"""Names of our own hidden folders: unfinished, set aside while a step is saved again, on their way out."""
_LOCK = ".lock"


class CheckpointStore:
    """Writes, finds and prunes the checkpoints below one folder. One process writes at a time."""

    def __init__(self, root: Path, max_to_keep: int | None = None) -> None:
        """Keep the `max_to_keep` newest checkpoints (None: all)."""
        self.root = root
        self.max_to_keep = max_to_keep
        self.last_serial = 0
        """Of a checkpoint that isn't here any more, or elsewhere: what is saved next comes after it."""

    @contextlib.contextmanager
    def writing(self, step: int, meta: Mapping[str, Any] | None = None) -> Iterator[Path]:
        """Yield a folder to write the checkpoint of `step` into; complete once the block ends without an exception.

        `meta` is kept in the manifest (JSON values). Raises `CheckpointWriteError` when the disk is full or
        refuses, `CheckpointError` when another process writes here; earlier checkpoints are untouched then.
        """
        unfinished = self.begin(step, meta)
        with unfinished.attributed():
            yield unfinished.folder
            unfinished.finish()

    def begin(self, step: int, meta: Mapping[str, Any] | None = None) -> Unfinished:
        """Return a checkpoint to write, which ends with its `finish` or `abandon`, in whatever thread."""
        if step < 0:
            raise ValueError(f"a checkpoint's step must be >= 0, got {step}")
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._lock())
                self._clean()
                folder = self._hidden(step, "writing")
                folder.mkdir()
            except OSError as error:
                raise self._write_error(step, error, _space(self.root)) from error
            return Unfinished(self, folder, step, dict(meta or {}), stack.pop_all())

    @contextlib.contextmanager
    def arriving(self, step: int) -> Iterator[Path]:
        """Yield a folder to fill with a checkpoint from elsewhere, its manifest included; it gets its name if the block
        ends without an exception, and takes the place of one of the same step."""
        unfinished = self.begin(step)
        with unfinished.attributed():
            yield unfinished.folder
            self._publish(unfinished.folder, step)
            unfinished.release()

    def remove(self, checkpoint: Checkpoint) -> None:
        """Delete a checkpoint; a kill on the way leaves nothing under its name. Warns where it can't."""
        doomed = checkpoint.path.with_name(self._hidden(checkpoint.step, "removed").name)
        try:
            # Renamed first: a kill in the middle of deleting must not leave half of a checkpoint under its name.
            os.rename(checkpoint.path, doomed)
            remove_dead_link(self.root)
            shutil.rmtree(doomed)
        except OSError as error:
            _logger.warning("couldn't delete the old checkpoint %s: %s", checkpoint.path, error)

    def set_aside(self) -> Path | None:
        """Move what is there into a folder `earlier.<n>` beside it, which is neither pruned nor looked at: a run that
        starts over deletes nothing that another one has saved. None: there was nothing.

        Raises `CheckpointError` when another process writes here.
        """
        if not self._named():
            return None
        with self._lock():
            aside = next(p for n in itertools.count(1) if not (p := self.root / f"earlier.{n}").exists())
            aside.mkdir()
            for path in self._named():
                os.rename(path, aside / path.name)
            if (self.root / LINK).is_symlink():
                os.rename(self.root / LINK, aside / LINK)
        return aside

    def complete(self) -> list[Checkpoint]:
        """Return all complete checkpoints, newest (saved last) first; sizes are checked, hashes aren't."""
        self._recover()
        checkpoints = []
        for path in self._named():
            try:
                checkpoints.append(read_manifest(path))
            except CheckpointError as error:
                _logger.warning("skipping %s: %s", path, error)
        return sorted(checkpoints, key=lambda checkpoint: checkpoint.serial, reverse=True)

    def latest(self) -> Checkpoint | None:
        """Return the complete checkpoint that was saved last."""
        return next(iter(self.complete()), None)

    def best(self) -> Checkpoint | None:
        """Return the complete checkpoint that the newest one says is the best so far; None: it says nothing, or that
        one isn't here."""
        there = self.complete()
        best = best_of(there[0].meta) if there else None
        return next((checkpoint for checkpoint in there if best is not None and checkpoint.step == best.step), None)

    def resolve(self, resume: bool | str | Path) -> Checkpoint | None:
        """Return the checkpoint to resume from, its hashes verified; None to start afresh.

        False: none. True: the newest intact one, which must exist. `auto`: the same, but none where none is there at
        all. `best`: the one that `save_best` has chosen. A path: that one, also relative to the store's folder. A
        damaged newer checkpoint is skipped with a warning.
        """
        if resume is False:
            return None
        if resume == LINK:
            if (best := self.best()) is None:
                raise CheckpointError(
                    f"resume_from_checkpoint is best, but {self.root} holds no best checkpoint ({self._listing()}); "
                    "save_best chooses one while a run trains"
                )
            return verify(best.path)
        if resume is not True and str(resume) != "auto":
            return self._at(Path(resume))
        for checkpoint in self.complete():
            try:
                return verify(checkpoint.path)
            except CheckpointError as error:
                _logger.warning("not resuming from %s: %s", checkpoint.path, error)
        if resume is True:
            raise CheckpointError(
                f"resume_from_checkpoint is true, but {self.root} holds no intact checkpoint "
                f"({self._listing()}); set it to auto to start afresh, or to the path of a checkpoint"
            )
        if self._named():
            raise CheckpointError(
                f"resume_from_checkpoint is auto, but every checkpoint in {self.root} is damaged ({self._listing()}); "
                "set it to false to start from scratch, which moves them aside, or name another output_dir"
            )
        return None

    def _at(self, path: Path) -> Checkpoint:
        candidates = [path] if path.is_absolute() else [path, self.root / path]
        for candidate in candidates:
            if (candidate / MANIFEST).exists():
                return verify(candidate)
        for candidate in candidates:
            if candidate.is_dir():
                inside = sorted(p.name for p in candidate.iterdir() if _NAME.fullmatch(p.name))
                hint = f"; it holds {inside}: name one of them" if inside else f": it has no {MANIFEST}"
                raise CheckpointError(f"resume_from_checkpoint: {candidate} isn't a complete checkpoint{hint}")
        raise CheckpointError(f"resume_from_checkpoint: {path} doesn't exist; {self.root} holds {self._listing()}")

    def _listing(self) -> str:
        return ", ".join(path.name for path in self._named()) or "no checkpoint-<step> folder"

    def _named(self) -> list[Path]:
        """Return the folders with a checkpoint's name, by step."""
        if not self.root.is_dir():
            return []
        named = [path for path in self.root.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
        return sorted(named, key=lambda path: int(path.name.split("-")[1]))

    def _hidden(self, step: int, state: str) -> Path:
        return self.root / f".checkpoint-{step}.{secrets.token_hex(4)}.{state}"

    def _finish(self, folder: Path, step: int, meta: Mapping[str, Any], known: Mapping[str, FileRecord]) -> None:
        serial = max((self.last_serial, *(checkpoint.serial for checkpoint in self.complete()))) + 1
        apply_umask(folder)
        names = files_below(folder)
        _check_visible(folder, known)
        records = {**known, **hash_files(folder, [name for name in names if name not in known], flush=True)}
        write_manifest(Checkpoint(folder, step, serial, dict(meta), {name: records[name] for name in names}))
        self._publish(folder, step)

    def _publish(self, folder: Path, step: int) -> None:
        for inner in [path for path in folder.rglob("*") if path.is_dir()]:
            sync_folder(inner)
        sync_folder(folder)
        final = self.root / f"checkpoint-{step}"
        old = self._make_room(final, step) if final.exists() else None
        os.rename(folder, final)
        sync_folder(self.root)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def _make_room(self, final: Path, step: int) -> Path | None:
        """Set aside what has the name already: our own to be deleted, anything else to be kept."""
        try:
            read_manifest(final)
        except CheckpointError as error:
            renamed = final.with_name(f"{final.name}.kept-{secrets.token_hex(4)}")
            _logger.warning(
                "%s is in the way and isn't a complete checkpoint (%s); renamed to %s", final, error, renamed
            )
            os.rename(final, renamed)
            return None
        old = self._hidden(step, "replaced")
        os.rename(final, old)
        return old

    def _prune(self, written: int) -> None:
        """Delete the oldest beyond `max_to_keep`, never the one just written, never the best, never a folder without
        our manifest."""
        if self.max_to_keep is None:
            return
        there = self.complete()
        best = next((best_of(checkpoint.meta) for checkpoint in there if checkpoint.step == written), None)
        retained = {written, *([] if best is None else [best.step])}
        for checkpoint in there[self.max_to_keep :]:
            if checkpoint.step not in retained:
                self.remove(checkpoint)

    def _clean(self) -> None:
        """Remove what killed writers left, and only that. The lock is held, so none of them is alive."""
        remove_unfinished_links(self.root)
        for path in list(self.root.iterdir()):
            match = _OURS.fullmatch(path.name)
            if match is None:
                continue
            final = self.root / f"checkpoint-{match[1]}"
            if match[2] == "replaced" and not final.exists():
                os.rename(path, final)  # killed between the two renames of saving a step again
            else:
                shutil.rmtree(path, ignore_errors=True)

    def _recover(self) -> None:
        """Bring back a checkpoint that a kill left between two renames, unless a writer is at work."""
        if not any(self.root.glob(".checkpoint-*.replaced")):
            return
        with contextlib.suppress(CheckpointError), self._lock():
            self._clean()

    def _lock(self) -> contextlib.AbstractContextManager[None]:
        """Be the only writer."""
        busy = f"another process is writing checkpoints to {self.root}; give each run its own output_dir"
        return folder_lock(self.root, _LOCK, busy=CheckpointError(busy))

    def _write_error(self, step: int, error: BaseException, room: str) -> CheckpointWriteError:
        return CheckpointWriteError(
            f"the checkpoint of step {step} couldn't be written to {self.root}: {first_line(error)}; {room}. "
            f"Earlier checkpoints are intact: {self._listing()}"
        )


class Unfinished:
    """A checkpoint on its way: its folder is filled, then it is finished or abandoned. Holds the folder's lock."""

    def __init__(
        self, store: CheckpointStore, folder: Path, step: int, meta: dict[str, Any], lock: contextlib.ExitStack
    ) -> None:
        self.folder = folder
        self.step = step
        self._store, self._meta, self._lock = store, meta, lock

    @property
    def final(self) -> Path:
        """Return where it is once it is finished."""
        return self._store.root / f"checkpoint-{self.step}"

    def finish(self, known: Mapping[str, FileRecord] | None = None) -> None:
        """Make it a checkpoint, and delete the oldest; raise `CheckpointError` if files that ranks wrote aren't seen.

        `known`: size and hash of files that were flushed and hashed where they were written.
        """
        self._store._finish(self.folder, self.step, self._meta, known or {})
        if (best := best_of(self._meta)) is not None:
            link_best(self._store.root, best.step)
        self._store._prune(self.step)
        self.release()

    def release(self) -> None:
        """Let others write here."""
        self._lock.close()

    def abandon(self) -> None:
        """Delete what there is of it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    @contextlib.contextmanager
    def attributed(self) -> Iterator[None]:
        """Abandon it if the block raises; what a full disk is behind of becomes a `CheckpointWriteError`."""
        try:
            yield
        except BaseException as error:
            refused = isinstance(error, Exception) and is_disk_full(error) and not isinstance(error, OSError)
            room = _space(self._store.root)  # before the unfinished folder makes room
            self.abandon()
            if refused or isinstance(error, OSError):
                raise self._store._write_error(self.step, error, room) from error
            raise


def _check_visible(folder: Path, known: Mapping[str, FileRecord]) -> None:
    """Raise `CheckpointError` for files of other processes that aren't in this machine's folder."""
    unseen = [name for name in known if not (folder / name).is_file()]
    if unseen:
        raise CheckpointError(
            f"{len(unseen)} files that ranks have written, such as {unseen[0]}, aren't in {folder}: the folder of "
            "checkpoints must be on storage that all machines share"
        )


def _space(root: Path) -> str:
    return f"{free_space(root)} are free there"
