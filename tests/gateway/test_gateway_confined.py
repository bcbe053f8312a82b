"""What a confined program has written, counted while it works against that."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from roll.gateway.agents import confined


@pytest.fixture(autouse=True)
def no_nameless_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confined, "_nameless", lambda: 0)


def test_a_file_that_goes_away_while_it_is_looked_at_hides_no_other(tmp_path, monkeypatch):
    (tmp_path / "large").write_bytes(b"x" * 100_000)
    (tmp_path / "gone").touch()
    listing = os.scandir

    @contextlib.contextmanager
    def listed(folder: str) -> Iterator[list[os.DirEntry[str]]]:
        with listing(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        (tmp_path / "gone").unlink()
        yield entries

    monkeypatch.setattr(confined.os, "scandir", listed)
    assert confined.written(str(tmp_path), 1 << 20) >= 100_000


@pytest.mark.parametrize("swapped", ["own/closed", "own"])
def test_a_link_in_the_place_of_a_closed_folder_opens_none_outside(tmp_path, monkeypatch, swapped):
    folder, outside = tmp_path / "work", tmp_path / "outside"
    (folder / "own" / "closed").mkdir(parents=True)
    (outside / "closed").mkdir(parents=True, mode=0o755)
    listing = os.scandir

    def refused(path: str) -> Iterator[os.DirEntry[str]]:
        if Path(path).name == "closed":
            if not (folder / swapped).is_symlink():
                (folder / swapped).rename(tmp_path / "aside")
                (folder / swapped).symlink_to(outside if swapped == "own" else outside / "closed")
            raise PermissionError(13, "closed", path)
        return listing(path)

    monkeypatch.setattr(confined.os, "scandir", refused)
    confined.written(str(folder), 1 << 20)
    assert (outside / "closed").stat().st_mode & 0o777 == 0o755


def test_a_closed_folder_is_opened_and_counted(tmp_path, monkeypatch):
    closed = tmp_path / "closed"
    closed.mkdir()
    (closed / "large").write_bytes(b"x" * 100_000)
    closed.chmod(0)
    listing = os.scandir

    def obeying(path: str) -> Iterator[os.DirEntry[str]]:
        if not os.stat(path).st_mode & 0o400:  # as for everybody but root
            raise PermissionError(13, "closed", path)
        return listing(path)

    monkeypatch.setattr(confined.os, "scandir", obeying)
    assert 100_000 <= confined.written(str(tmp_path), 1 << 20) < 1 << 20
