"""A coding agent as a program, started for each episode in the sandbox: it edits a file until a test passes.

    tests fail: f(10) is 10, not 16      write_file(path="f.py", text="def f(x): return x + 6")      tests pass

It speaks HTTP and needs no package. What the policy writes is run, so it wants `sandbox: true`. The last line that it
prints is its score.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_CALLS = 6
FILE = "f.py"
BEFORE = "def f(x): return x"
QUESTION = "Make the tests pass."
SLOW = 10.0
"""Seconds that a test may take."""
TEXT = {"type": "string"}
PARAMETERS: dict[str, dict[str, Any]] = {
    "run_tests": {"type": "object", "properties": {}},
    "write_file": {"type": "object", "properties": {"path": TEXT, "text": TEXT}, "required": ["path", "text"]},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS[name]}} for name in PARAMETERS]


class Project:
    """A folder with one file, and a test of it. Everything follows from the seed.

    Args:
        seed: of the task.
        folder: an empty one.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        rng = random.Random(seed)
        sign, number = rng.choice("+-*"), rng.randint(2, 9)
        self.wanted = {"+": 10 + number, "-": 10 - number, "*": 10 * number}[sign]
        self._folder = folder
        (folder / FILE).write_text(BEFORE)

    def run_tests(self) -> str:
        """Return `ok`, or what is wrong."""
        program = "import sys; sys.path.insert(0, '.'); import f; print(f.f(10))"
        try:
            done = subprocess.run(
                [sys.executable, "-SB", "-c", program], cwd=self._folder, capture_output=True, text=True, timeout=SLOW
            )
        except (subprocess.TimeoutExpired, UnicodeDecodeError):
            return "failed"
        if done.returncode:
            return f"failed: {done.stderr.strip().rpartition(chr(10))[2].partition(':')[0][:40]}"
        found = done.stdout.strip()[:20]
        return "ok" if found == str(self.wanted) else f"f(10) is {found}, not {self.wanted}"

    def write_file(self, path: str, text: str) -> str:
        """Write the file that there is."""
        if path != FILE:
            return f"error: there is only {FILE}"
        (self._folder / FILE).write_text(text)
        return "written"

    def call(self, name: str, arguments: str) -> str:
        """Return what a tool replies, to whatever the policy has written."""
        if name not in PARAMETERS:
            return "error: no such tool"
        try:
            return str(getattr(self, name)(**json.loads(arguments)))
        except (TypeError, ValueError, RecursionError):
            return "error: wrong arguments"


def answer_to(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the policy says to a conversation."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": os.environ["ROLL_MODEL"], "messages": messages, "tools": TOOLS}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as reply:
        message: dict[str, Any] = json.load(reply)["choices"][0]["message"]
    return message


def play(task: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Edit until the policy calls no tool any more; return the score."""
    project = Project(task["seed"], folder)
    messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    for _ in range(MAX_CALLS):
        message = answer_to(messages)
        messages.append(message)
        for call in message.get("tool_calls") or []:
            result = project.call(call["function"]["name"], call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if not message.get("tool_calls"):
            break
    passes = project.run_tests() == "ok"
    return {"reward": float(passes), "success": passes}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:  # below ROLL_WORKSPACE in the sandbox
        print(json.dumps(play(json.loads(os.environ["ROLL_TASK"]), Path(made))))
