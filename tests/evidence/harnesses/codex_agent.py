"""Codex, without a terminal: the policy runs a command in an empty folder, over Responses."""

from __future__ import annotations

import os
import subprocess
import tempfile

CONFIG = """
model = "policy"
model_provider = "roll"
approval_policy = "never"
sandbox_mode = "danger-full-access"

[model_providers.roll]
name = "roll"
base_url = "{base_url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""


def play(task, base_url, api_key):
    """Pay for the right sum."""
    with tempfile.TemporaryDirectory() as home:
        os.mkdir(f"{home}/.codex")
        with open(f"{home}/.codex/config.toml", "w") as file:
            file.write(CONFIG.format(base_url=base_url))
        env = {"PATH": os.environ["PATH"], "HOME": home, "OPENAI_API_KEY": api_key}
        command = ["codex", "exec", "--skip-git-repo-check"]
        done = subprocess.run(
            [*command, task["question"]],
            env=env, cwd=home, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{done.returncode}: {done.stdout[-500:]} {done.stderr[-500:]}")
    return float(task["answer"] in done.stdout)
