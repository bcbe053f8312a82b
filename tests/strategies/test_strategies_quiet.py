"""What packages say on a normal run stays out of the user's terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CASE = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
from roll.utils.logging import setup_logging
from train_contract import LOSS, build, make_batch, make_spec
spec = make_spec({model!r}, strategy={strategy!r})
"""
EXPORT = "build(spec).export(Path({folder!r}))\n"
LOADED = "print([name for name in ('deepspeed', 'mlflow', 'pandas', 'datasets') if name in sys.modules])\n"
STEP = "setup_logging()\nbuild(spec).train_step(make_batch(), LOSS)\n"
ASKED = "import logging\nlogging.getLogger('megatron').setLevel('INFO')\n"


def printed(script, model, strategy, folder="", first=""):
    """(standard output, standard error) of a new process; `first`: before anything is imported."""
    tests = Path(__file__).parents[1]
    paths = [str(tests / "strategies"), str(tests)]
    script = (first + CASE + script).format(paths=paths, model=str(model), strategy=strategy, folder=str(folder))
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, timeout=600, check=True, cwd=tests.parent, env=environment,
    )  # fmt: skip
    return done.stdout, done.stderr


def test_an_export_prints_nothing_and_imports_no_package_that_transformers_finds(tiny_model, tmp_path):
    assert printed(EXPORT + LOADED, tiny_model, "fsdp2_train", tmp_path / "out") == ("[]\n", "")


def test_an_export_and_a_step_of_megatron_print_nothing(tiny_model, tmp_path):
    assert printed(EXPORT + STEP, tiny_model, "megatron_train", tmp_path / "out") == ("", "")


def test_megatron_speaks_when_it_is_asked_to(tiny_model):
    out, err = printed(STEP, tiny_model, "megatron_train", first=ASKED)
    assert out == ""
    assert "Setting up optimizer" in err
