"""The same with openai-agents, which speaks the protocol Responses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from agents import Agent, MaxTurnsExceeded, ModelBehaviorError, OpenAIProvider, RunConfig, Runner, function_tool
from openai import AsyncOpenAI

sys.path.insert(0, str(Path(__file__).parent))
from boxes import INSTRUCTIONS, Boxes

MAX_CALLS = 5


async def play(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Answer one question; return the score of the answer."""
    boxes = Boxes(task)

    # Not strict: no engine can promise arguments that follow a schema.
    @function_tool(strict_mode=False)
    def look(box: str) -> str:
        """Read the number in a box"""
        return boxes.call("look", {"box": box})

    @function_tool(strict_mode=False)
    def add(a: int, b: int) -> str:
        """Sum of two numbers"""
        return boxes.call("add", {"a": a, "b": b})

    agent = Agent(name="boxes", instructions=INSTRUCTIONS, model="policy", tools=[look, add])
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        settings = RunConfig(
            model_provider=OpenAIProvider(openai_client=client),
            tracing_disabled=True,
            tool_not_found_behavior="return_error_to_model",
        )
        try:
            result = await Runner.run(agent, boxes.question, max_turns=MAX_CALLS, run_config=settings)
        except (MaxTurnsExceeded, ModelBehaviorError):  # it takes a response that is cut off for the latter
            return boxes.score(None)
    return boxes.score(result.final_output)
