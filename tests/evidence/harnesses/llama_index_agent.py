"""LlamaIndex: an agent that calls a function, over Chat Completions."""

from __future__ import annotations

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def play(task, base_url, api_key):
    """Pay for the right sum."""
    options = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 4096}
    llm = OpenAILike(model="policy", api_base=base_url, api_key=api_key, **options)
    agent = FunctionAgent(tools=[add], llm=llm, system_prompt="Use the tool.")
    return float(task["answer"] in str(await agent.run(task["question"])))
