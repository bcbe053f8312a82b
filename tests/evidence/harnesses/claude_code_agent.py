"""Claude Code, without a terminal: the policy runs a command in an empty folder, over Messages."""

from __future__ import annotations

import os
import subprocess
import tempfile


def play(task, base_url, api_key):
    """Pay for the right sum."""
    with tempfile.TemporaryDirectory() as home:
        env = {
            "PATH": os.environ["PATH"],
            "HOME": home,
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": api_key,
            "ANTHROPIC_MODEL": "policy",
            "ANTHROPIC_SMALL_FAST_MODEL": "policy",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "policy",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        }
        command = ["claude", "--print", task["question"]]
        command += ["--allowedTools", "Bash", "--output-format", "text"]
        done = subprocess.run(
            command, env=env, cwd=home, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280
        )
    if done.returncode:
        raise RuntimeError(f"{done.returncode}: {done.stdout[-500:]} {done.stderr[-500:]}")
    return float(task["answer"] in done.stdout)
