"""Streamed rows don't fill the memory: measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PASS = """
import json, resource, sys
from pathlib import Path
from roll.configs.schema.worker_config import DataArgs
from roll.data.prompts import LengthRule
from roll.data.quarantine import Quarantine
from roll.data.sampler import TaskSource
from roll.data.streaming import Streamer
from roll.data.templates import EncodedPrompt

class Stub:  # measures no tokenizer
    def encode_within(self, task, limit, cut):
        return EncodedPrompt((1,), 1)

file, rows = Path(sys.argv[1]), int(sys.argv[2])
text = "x" * 2500
with file.open("w") as out:
    for i in range(rows):
        out.write(json.dumps({"prompt": f"{i} {text}", "answer": i}) + "\\n")
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
data = DataArgs(file_name=(str(file),))
streamer = Streamer(data, Stub(), LengthRule(9, "error"), tags={"d": ["d"]}, seed=1, default_tag="d",
                    prompt_length=9, quarantine=Quarantine(), folder=file.parent)
found = streamer.scan({"d": []})
source = TaskSource(found.tables, seed=1, probs={"d": 1})
seen = {task.id for _ in range(rows // 100) for task in source.take(50)}
assert len(seen) == rows // 100 * 50
print(file.stat().st_size / 2**20, peak() - before)
"""


@pytest.mark.parametrize("rows", [20_000, 400_000], ids=["50 MB", "1 GB"])
def test_streamed_rows_take_a_small_part_of_their_file(tmp_path: Path, rows: int) -> None:
    command = [sys.executable, "-c", PASS, str(tmp_path / "rows.jsonl"), str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    size, memory = map(float, done.stdout.split())
    # A chunk of rows, the index of about 60 bytes a row, the ids that this test keeps, and what numpy takes.
    assert memory < 25 + 250 * rows / 2**20, f"{memory:.0f} MiB for a file of {size:.0f} MiB"
