"""smolagents: its agent that calls tools, over Chat Completions."""

from __future__ import annotations

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def play(task, base_url, api_key):
    """Pay for the right sum."""
    model = OpenAIServerModel(model_id="policy", api_base=base_url, api_key=api_key)
    agent = ToolCallingAgent(tools=[add], model=model, max_steps=4, verbosity_level=0)
    return float(task["answer"] in str(agent.run(task["question"])))
