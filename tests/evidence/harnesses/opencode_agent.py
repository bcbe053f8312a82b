"""opencode, without a terminal: the policy runs a command in an empty folder, over Chat Completions."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile


def play(task, base_url, api_key):
    """Pay for the right sum."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": base_url, "apiKey": api_key},
        "models": {"policy": {"limit": {"context": 4096, "output": 128}}},
    }
    config = {"provider": {"roll": provider}, "model": "roll/policy", "small_model": "roll/policy", "share": "disabled"}
    config |= {"autoupdate": False, "permission": {"*": "allow"}}
    with tempfile.TemporaryDirectory() as home:
        env = {"PATH": os.environ["PATH"], "HOME": home, "OPENCODE_CONFIG_CONTENT": json.dumps(config)}
        env |= {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}
        env |= {"OPENCODE_DISABLE_DEFAULT_PLUGINS": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"}
        command = ["opencode", "run", task["question"]]
        done = subprocess.run(
            command, env=env, cwd=home, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280
        )
    if done.returncode:
        raise RuntimeError(f"{done.returncode}: {done.stdout[-500:]} {done.stderr[-500:]}")
    return float(task["answer"] in done.stdout)
