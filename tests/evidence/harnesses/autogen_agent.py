"""AutoGen: an assistant with one tool, over Chat Completions."""

from __future__ import annotations

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def play(task, base_url, api_key):
    """Pay for the right sum."""
    info = {"vision": False, "function_calling": True, "json_output": False, "family": "unknown"}
    info["structured_output"] = False
    client = OpenAIChatCompletionClient(model="policy", base_url=base_url, api_key=api_key, model_info=info)
    agent = AssistantAgent("adder", client, tools=[add], reflect_on_tool_use=True, system_message="Use the tool.")
    result = await agent.run(task=task["question"])
    return float(task["answer"] in result.messages[-1].content)
