"""What Megatron says on a normal run stays out of the user's terminal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CASE = """
import logging, sys
{first}
sys.path[:0] = {paths!r}
from roll.utils.logging import setup_logging
setup_logging()
from train_contract import LOSS, build, make_batch, make_spec
strategy = build(make_spec({model!r}, strategy="megatron_train"))
strategy.train_step(make_batch(), LOSS)
"""


@pytest.mark.parametrize("asked", [False, True])
def test_a_step_says_nothing_unless_asked(tiny_model, asked):
    tests = Path(__file__).parents[1]
    first = "logging.getLogger('megatron').setLevel('INFO')" if asked else ""
    script = CASE.format(first=first, paths=[str(tests / "strategies"), str(tests)], model=str(tiny_model))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True, cwd=tests.parent
    )
    assert done.stdout == ""
    assert ("Setting up optimizer" in done.stderr) is asked
    assert asked or done.stderr == ""
