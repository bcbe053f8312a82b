"""aider, without a terminal: the policy edits a file of a repository, over Chat Completions by litellm."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path


def play(task, base_url, api_key):
    """Pay for the right sum in the file."""
    with tempfile.TemporaryDirectory() as home:
        env = {"PATH": os.environ["PATH"], "HOME": home, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        env |= {"OPENAI_API_BASE": base_url, "OPENAI_API_KEY": api_key, "AIDER_ANALYTICS_DISABLE": "true"}
        for words in (["init", "-q"], ["config", "user.email", "a@b.c"], ["config", "user.name", "a"]):
            subprocess.run(["git", *words], cwd=home, env=env, check=True)
        Path(home, "answer.txt").write_text("12 + 7 = ?\n")
        options = ["--model", "openai/policy", "--yes-always", "--no-check-update", "--no-show-model-warnings"]
        options += ["--edit-format", "whole", "--no-pretty", "--no-gitignore", "--map-tokens", "0", "--no-stream"]
        done = subprocess.run(
            [sys.executable, "-m", "aider", *options, "--message", task["question"], "answer.txt"],
            env=env, cwd=home, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280,
        )  # fmt: skip
        written = Path(home, "answer.txt").read_text()
    if done.returncode:
        raise RuntimeError(f"{done.returncode}: {done.stdout[-500:]} {done.stderr[-500:]}")
    return float(task["answer"] in written)
