"""The protocols that clients speak: JSON bodies to `ChatCall`, `ChatAnswer` to JSON and to server-sent events."""

from __future__ import annotations

from roll.gateway.protocols.anthropic import AnthropicMessages, AnthropicTokenCount
from roll.gateway.protocols.openai_chat import ChatCompletions
from roll.gateway.protocols.openai_responses import Responses
from roll.gateway.protocols.wire import WireFormat


def wire_formats() -> dict[str, WireFormat]:
    """Return the protocols of one session, by the routes that speak them."""
    return {
        "chat/completions": ChatCompletions(),
        "messages": AnthropicMessages(),
        "messages/count_tokens": AnthropicTokenCount(),
        "responses": Responses(),
    }
