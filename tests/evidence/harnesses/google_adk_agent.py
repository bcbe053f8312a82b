"""Google's ADK: an agent with one tool, over Chat Completions by its LiteLlm."""

from __future__ import annotations

from google.adk.agents import Agent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def play(task, base_url, api_key):
    """Pay for the right sum."""
    model = LiteLlm(model="openai/policy", api_base=base_url, api_key=api_key)
    agent = Agent(name="adder", model=model, instruction="Use the tool.", tools=[add])
    runner = InMemoryRunner(agent=agent, app_name="adder")
    session = await runner.session_service.create_session(app_name="adder", user_id="user")
    message = types.Content(role="user", parts=[types.Part(text=task["question"])])
    said = ""
    async for event in runner.run_async(user_id="user", session_id=session.id, new_message=message):
        if event.is_final_response() and event.content:
            said = "".join(part.text or "" for part in event.content.parts)
    return float(task["answer"] in said)
