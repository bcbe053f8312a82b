"""pydantic-ai: an agent with one tool, over Chat Completions, Responses or Messages."""

from __future__ import annotations

from pydantic_ai import Agent


def _model(protocol, base_url, api_key):
    if protocol == "messages":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        return AnthropicModel("policy", provider=AnthropicProvider(base_url=base_url[:-3], api_key=api_key))
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIResponsesModel if protocol == "responses" else OpenAIChatModel
    return model("policy", provider=OpenAIProvider(base_url=base_url, api_key=api_key))


async def play(task, base_url, api_key):
    """Pay for the right sum."""
    agent = Agent(_model(task.get("protocol", "chat"), base_url, api_key), system_prompt="Use the tool.")

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    answer = await agent.run(task["question"])
    return float(task["answer"] in answer.output)
