"""Memory that is freed goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from roll.utils.memory import keep_little_freed_memory, return_freed_memory
import psutil
keep_little_freed_memory()
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
