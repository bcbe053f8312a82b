"""strands: an agent with one tool, over Chat Completions or Messages."""

from __future__ import annotations

from strands import Agent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def _model(protocol, base_url, api_key):
    if protocol == "messages":
        from strands.models.anthropic import AnthropicModel

        client = {"api_key": api_key, "base_url": base_url[:-3]}
        return AnthropicModel(client_args=client, model_id="policy", max_tokens=128)
    if protocol == "responses":
        from strands.models.openai_responses import OpenAIResponsesModel

        return OpenAIResponsesModel(client_args={"api_key": api_key, "base_url": base_url}, model_id="policy")
    from strands.models.openai import OpenAIModel

    return OpenAIModel(client_args={"api_key": api_key, "base_url": base_url}, model_id="policy")


def play(task, base_url, api_key):
    """Pay for the right sum."""
    model = _model(task.get("protocol", "chat"), base_url, api_key)
    agent = Agent(model=model, tools=[add], system_prompt="Use the tool.", callback_handler=None)
    return float(task["answer"] in str(agent(task["question"])))
