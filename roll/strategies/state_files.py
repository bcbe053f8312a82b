"""Where strategies write: files on the disk, or copies in memory that are written later, while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from torch import Tensor


class StateFiles:
    """Writes at once."""

    holds: bool = False
    """Whether tensors are written later, and must be copied where training would change them."""
    flushes: bool = True
    """Whether torch's files are on the disk, and not only with the system, when they are written."""

    def text(self, path: Path, text: str) -> None:
        """Write a small file."""
        path.write_text(text, encoding="utf-8")

    def tensors(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write a safetensors file. The tensors are on the CPU, contiguous, and the caller's own if `holds`."""
        from safetensors.torch import save_file

        save_file(dict(tensors), path)

    def folder(self, path: Path, write: Callable[[Path], None]) -> None:
        """Have `write` fill a folder of its own; it runs later if `holds`, in another thread."""
        write(path)

    def torch_writer(self, folder: Path) -> Any:
        """Return the writer of torch's distributed checkpoints into `folder`."""
        from torch.distributed.checkpoint import FileSystemWriter

        return FileSystemWriter(folder, sync_files=self.flushes)


class WrittenFiles(StateFiles):
    """Writes at once, and remembers what; whoever hashes the files waits for the disk meanwhile."""

    flushes = False

    def __init__(self) -> None:
        self._written: set[Path] = set()

    @property
    def paths(self) -> list[Path]:
        """Return the files, in order."""
        return sorted(self._written)

    def text(self, path: Path, text: str) -> None:
        super().text(path, text)
        self._written.add(path)

    def tensors(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        super().tensors(path, tensors)
        self._written.add(path)

    def folder(self, path: Path, write: Callable[[Path], None]) -> None:
        super().folder(path, write)
        self._written.update(inner for inner in path.rglob("*") if inner.is_file())

    def torch_writer(self, folder: Path) -> Any:
        from torch.distributed.checkpoint.filesystem import FileSystem

        written = self._written

        class Watched(FileSystem):
            """Tells what the writer opens."""

            @contextmanager
            def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
                with super().create_stream(path, mode) as stream:
                    yield stream
                written.add(Path(path))

            def rename(self, path: Any, new_path: Any) -> None:
                super().rename(path, new_path)
                written.discard(Path(path))
                written.add(Path(new_path))

        writer = super().torch_writer(folder)
        writer.fs = Watched()
        return writer


class HeldFiles(StateFiles):
    """Keeps what it is given in memory until `write`, which another thread may call."""

    holds = True

    def __init__(self) -> None:
        self._writes: list[tuple[Path, Callable[[Path], None]]] = []
        self._streams: dict[Path, BytesIO] = {}

    def text(self, path: Path, text: str) -> None:
        self._writes.append((path, lambda place: _write(place, text.encode())))

    def tensors(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        snapshot = dict(tensors)
        self._writes.append((path, lambda place: StateFiles.tensors(self, place, snapshot)))

    def folder(self, path: Path, write: Callable[[Path], None]) -> None:
        self._writes.append((path, write))

    def torch_writer(self, folder: Path) -> Any:
        return _memory_writer(folder, self._streams)

    def write(self) -> Iterator[Path]:
        """Write everything, and yield each file that is complete; its memory is free then."""
        while self._streams:
            path, stream = self._streams.popitem()
            _write(path, stream.getbuffer())
            del stream  # its memory, before whoever takes the file waits for the disk
            yield path
        while self._writes:
            path, write = self._writes.pop()
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
            del write
            yield from sorted(inner for inner in path.rglob("*") if inner.is_file()) if path.is_dir() else [path]


def _write(path: Path, content: bytes | memoryview) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)


class _Kept(BytesIO):
    def close(self) -> None:
        """Do nothing: the writer closes what it has written, and it is still to be read."""


def _memory_writer(folder: Path, streams: dict[Path, BytesIO]) -> Any:
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.filesystem import FileSystem

    class Memory(FileSystem):
        """The part of a file system that the writer uses."""

        @contextmanager
        def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
            assert mode == "wb", f"checkpoints are only written here, mode {mode}"
            streams[Path(path)] = stream = _Kept()
            yield stream

        def rename(self, path: Any, new_path: Any) -> None:
            streams[Path(new_path)] = streams.pop(Path(path))

        def mkdir(self, path: Any) -> None:
            """Make no folder yet: folders are made when the files are written."""

        def exists(self, path: Any) -> bool:
            return Path(path) in streams

        def rm_file(self, path: Any) -> None:
            del streams[Path(path)]

    writer: Any = FileSystemWriter(folder, sync_files=False)
    writer.fs = Memory()
    return writer
