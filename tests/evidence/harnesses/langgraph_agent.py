"""langchain's agent on langgraph: one tool, over Chat Completions, Responses or Messages."""

from __future__ import annotations

from langchain.agents import create_agent
from langchain_core.tools import tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def _model(protocol, base_url, api_key):
    if protocol == "messages":
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(model="policy", base_url=base_url[:-3], api_key=api_key, max_tokens=128)
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="policy", base_url=base_url, api_key=api_key, use_responses_api=protocol == "responses")


def play(task, base_url, api_key):
    """Pay for the right sum."""
    model = _model(task.get("protocol", "chat"), base_url, api_key)
    agent = create_agent(model, tools=[add], system_prompt="Use the tool.")
    state = agent.invoke({"messages": [{"role": "user", "content": task["question"]}]})
    return float(task["answer"] in str(state["messages"][-1].content))
