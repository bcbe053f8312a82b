"""openai-agents: an agent with one tool, over Chat Completions or Responses."""

from __future__ import annotations

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


async def play(task, base_url, api_key):
    """Pay for the right sum."""
    set_tracing_disabled(True)

    @function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    kind = OpenAIResponsesModel if task.get("protocol") == "responses" else OpenAIChatCompletionsModel
    model = kind(model="policy", openai_client=AsyncOpenAI(base_url=base_url, api_key=api_key))
    agent = Agent(name="adder", instructions="Use the tool.", model=model, tools=[add])
    result = await Runner.run(agent, task["question"])
    return float(task["answer"] in result.final_output)
