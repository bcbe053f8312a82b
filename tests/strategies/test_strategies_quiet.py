"""An export prints nothing, whatever packages transformers finds and imports for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASE = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
from train_contract import build, make_spec
build(make_spec({model!r}, strategy={strategy!r})).export(Path({folder!r}))
"""


@pytest.mark.parametrize("strategy", ["fsdp2_train", "megatron_train"])
def test_an_export_prints_nothing(tiny_model, tmp_path, strategy):
    tests = Path(__file__).parents[1]
    paths = [str(tests / "strategies"), str(tests)]
    script = CASE.format(paths=paths, model=str(tiny_model), strategy=strategy, folder=str(tmp_path / "out"))
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, timeout=120, check=True, cwd=tests.parent, env=environment,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("", "")
