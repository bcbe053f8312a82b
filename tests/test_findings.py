"""The scripts in findings/: their form, without running them. findings/README.md says what one is."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "findings"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
MAX_LINES = 60
OF_THE_COMMENT = {
    "a version": r"\d+\.\d+",
    "what most expect": r"(?i)expect",
    "what happens": r"(?i)\b(happens|seen)\b",
    "why it matters": r"(?i)\bmatters\b",
}
WITH_A_VALUE = (
    "-t",
    "--target",
    "--prefix",
    "-i",
    "--index-url",
    "--extra-index-url",
    "-c",
    "--constraint",
    "--python",
)
SKELETON = """#!/usr/bin/env bash
# somepackage 1.2.3: two lists.
# Expected: one thing.
# Happens: another.
# Matters: to all.
set -euo pipefail
folder=$(mktemp -d)
pip install -q --target "$folder" somepackage==1.2.3
"""


def problems(text: str) -> list[str]:
    """What a script lacks of the form."""
    lines = text.splitlines()
    found = [f"{len(lines)} lines, more than {MAX_LINES}"] if len(lines) > MAX_LINES else []
    comment = leading_comment(lines)
    found += [f"the comment doesn't say {what}" for what, pattern in OF_THE_COMMENT.items()
              if not re.search(pattern, comment)]  # fmt: skip
    if not re.search(r"(?m)^set -e", text):
        found.append("no set -e: a failure in the middle would go unseen")
    if "mktemp" not in text:
        found.append("no temporary folder (mktemp)")
    if not (names := requirements(text)):
        found.append("it installs nothing")
    found += [f"{name} isn't pinned (NAME==VERSION)" for name in names if "==" not in name]
    if re.search(r"(?m)^\s*(import|from) roll\b|\broll_rl\b", text):
        found.append("it runs our code")
    found += [f"a path of a machine: {path}" for path in re.findall(r"(?<![\w$}])/(?:home|root|work|Users)/\S*", text)]
    return found


def leading_comment(lines: list[str]) -> str:
    """The block of comments that a script begins with, without the line that names the shell."""
    block = []
    for line in lines:
        if line.startswith("#!"):
            continue
        if not line.startswith("#"):
            break
        block.append(line.lstrip("# "))
    return " ".join(block)


def requirements(text: str) -> list[str]:
    """What the lines of `pip install` name."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        match = re.search(r"\bpip[\w.]*\"?'? install (.*)", line)
        if match is None or line.lstrip().startswith("#"):
            continue
        words = iter(shlex.split(re.split(r"\s(?:>|2>|\||&&|;)", match[1])[0].rstrip(";")))
        for word in words:
            if word in WITH_A_VALUE:
                next(words, None)
            elif word[0] not in "-$/." and not word.startswith(("pip", "setuptools", "wheel")):
                found.append(word)
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_finding_has_the_form_that_the_page_describes(script):
    assert not problems(script.read_text("utf-8"))
    checked = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_the_page_shows_a_script_of_that_form():
    (shown,) = re.findall(r"```bash\n(.*?)```", (FOLDER / "README.md").read_text("utf-8"), re.DOTALL)
    assert problems(shown) == []
    assert subprocess.run(["bash", "-n"], input=shown, text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("", ""), []),
        (("==1.2.3\n", "\n"), ["somepackage isn't pinned (NAME==VERSION)"]),
        (("==1.2.3\n", ">=1.2.3 other==1\n"), ["somepackage>=1.2.3 isn't pinned (NAME==VERSION)"]),
        (("# Matters: to all.\n", ""), ["the comment doesn't say why it matters"]),
        (("# Expected: one thing.\n", ""), ["the comment doesn't say what most expect"]),
        (("1.2.3: two", "two"), ["the comment doesn't say a version"]),
        (("set -euo pipefail\n", ""), ["no set -e: a failure in the middle would go unseen"]),
        (("folder=$(mktemp -d)\n", ""), ["no temporary folder (mktemp)"]),
        (("pip install", "echo"), ["it installs nothing"]),
        (("==1.2.3\n", "==1.2.3\npython -c '\nimport roll\n'\n"), ["it runs our code"]),
        (("==1.2.3\n", "==1.2.3\ncd /home/me/there\n"), ["a path of a machine: /home/me/there"]),
        (("==1.2.3\n", "==1.2.3\n" + "true\n" * 60), ["68 lines, more than 60"]),
    ],
)
def test_what_a_script_lacks_is_told(change, expected):
    assert problems(SKELETON.replace(*change)) == expected if change[0] else problems(SKELETON) == expected
