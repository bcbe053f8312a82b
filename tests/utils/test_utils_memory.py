"""Memory that is freed goes back to the system."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from roll.utils import memory

PROGRAM = """
import sys
from roll.utils.memory import return_freed_memory, reuse_freed_memory
import psutil
reuse_freed_memory()
kept = []
def rss():
    return psutil.Process().memory_info().rss / 2**20
start = rss()
blocks = [bytearray(100_000) for _ in range(3_000)]  # 300 MB in blocks that the heap has
kept = blocks[::150]  # and that can't shrink at its end
kept.append(bytearray(100_000))
full = rss()
del blocks
return_freed_memory()
print(full - start > 250, rss() - start < 60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_blocks_between_used_ones_are_returned():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


AGAIN = """
import mmap
import resource
from roll.utils.memory import reuse_freed_memory
reuse_freed_memory()
size = 16 << 20
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = bytearray(b"1") * size  # touches every page
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
first, again = faults(), faults()
pages = size // mmap.PAGESIZE
print(first > pages // 2, again < pages // 50)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_a_large_block_lies_on_the_pages_of_the_one_freed_before():
    # Activations of one micro-batch are as large as those of the next: new pages for each cost a third of a pass.
    done = subprocess.run([sys.executable, "-c", AGAIN], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


@pytest.mark.parametrize(("left", "trims"), [(0, 1), (1 << 50, 0)])
def test_where_memory_isnt_scarce_freed_blocks_stay(monkeypatch, left, trims):
    calls = []
    monkeypatch.setattr(memory, "available_memory", lambda: left)
    monkeypatch.setattr(memory, "_glibc", lambda: SimpleNamespace(malloc_trim=calls.append))
    memory.return_freed_memory(if_scarce=True)
    assert len(calls) == trims
    memory.return_freed_memory()
    assert len(calls) == trims + 1


@pytest.mark.parametrize(("limit", "expected"), [("1000", 300), ("max", 5000), (None, 5000), ("100000", 5000)])
def test_available_memory_is_bounded_by_the_control_group(monkeypatch, tmp_path, limit, expected):
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=5000))
    monkeypatch.setattr(memory, "_CONTROL_GROUP", tmp_path)
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("700\n")
    assert memory.available_memory() == expected
