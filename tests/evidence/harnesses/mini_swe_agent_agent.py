"""mini-swe-agent: the policy writes commands, over Chat Completions by litellm."""

from __future__ import annotations

import tempfile

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel


def play(task, base_url, api_key):
    """Pay for the right sum."""
    model = LitellmModel(model_name="openai/policy", model_kwargs={"api_base": base_url, "api_key": api_key})
    with tempfile.TemporaryDirectory() as folder:
        environment = LocalEnvironment(cwd=folder)
        words = {"system_template": "Use the tool.", "instance_template": "{{task}}"}
        result = DefaultAgent(model, environment, **words).run(task["question"])
    return float(task["answer"] in str(result))
