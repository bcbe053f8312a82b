"""Qwen Code, without a terminal: the policy runs a command in an empty folder, over Chat Completions."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile


def play(task, base_url, api_key):
    """Pay for the right sum."""
    with tempfile.TemporaryDirectory() as home:
        os.mkdir(f"{home}/.qwen")
        with open(f"{home}/.qwen/settings.json", "w") as file:  # else it asks what to remember for later conversations
            json.dump({"memory": {"enableManagedAutoMemory": False}}, file)
        env = {"PATH": os.environ["PATH"], "HOME": home}
        env |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "OPENAI_MODEL": "policy"}
        command = ["qwen", "--yolo", "--auth-type", "openai"]
        done = subprocess.run(
            [*command, "--prompt", task["question"]],
            env=env, cwd=home, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{done.returncode}: {done.stdout[-500:]} {done.stderr[-500:]}")
    return float(task["answer"] in done.stdout)
