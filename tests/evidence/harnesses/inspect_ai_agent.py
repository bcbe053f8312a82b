"""Inspect: its agent with one tool, over Chat Completions, Responses or Messages."""

from __future__ import annotations

import tempfile

from inspect_ai import Task, eval
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.tool import Tool, tool


@tool
def add() -> Tool:
    async def execute(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first.
            b: the second.
        """
        return a + b

    return execute


def play(task, base_url, api_key):
    """Pay for the right sum."""
    protocol = task.get("protocol", "chat")
    name = "anthropic/policy" if protocol == "messages" else "openai-api/roll/policy"
    address = base_url[:-3] if protocol == "messages" else base_url
    options = {"responses_api": True} if protocol == "responses" else {}
    # memoize: a model is remembered by its name, with the address and the key of the first episode.
    model = get_model(name, base_url=address, api_key=api_key, memoize=False, **options)
    work = Task(dataset=[Sample(task["question"])], solver=react(prompt="Use the tool.", tools=[add()], submit=False))
    with tempfile.TemporaryDirectory() as folder:
        (log,) = eval(work, model=model, display="none", log_dir=folder)
        if log.status != "success":
            raise RuntimeError(str(log.error))
        return float(task["answer"] in log.samples[0].output.completion)
