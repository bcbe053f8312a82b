"""What answers an agent's calls reads them in the form of the model's chat template, or says that it can't."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from chat_tokenizers import ids_of
from family_templates import FAMILIES, marked_tokenizer
from tiny_models import char_tokenizer

from roll.configs.schema.agents_config import AgentEnv
from roll.gateway.agents.sessions import session_maker
from roll.gateway.base import ChatCall
from roll.gateway.reading import ResponseReader
from roll.rollout.agent import Agent
from roll.rollout.message_graph import MessageGraph
from roll.strategies.base import Completion
from roll.types.chat import Message, ToolCall, ToolSpec

CALLS = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.role + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<call ' + c.function.name + '>' + c.function.arguments | tojson }}"
    "{% endfor %}{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)


def maker(template, parser="auto"):
    tokenizer = char_tokenizer()
    tokenizer.chat_template = template
    env = AgentEnv(command="true", tool_parser=parser)
    return session_maker(env, Agent(tokenizer), tokenizer, thinking_tags=None, models={})


def test_a_form_of_calls_that_isnt_known_is_refused_for_agents_as_for_tools():
    with pytest.raises(ValueError, match=r"tool_parser: auto.*none gives back what this one writes.*<call look_up>"):
        maker(CALLS)
    assert maker(CALLS, "hermes")  # whoever knows better says so
    assert maker(CALLS.replace("<call ' + c.function.name + '>'", "[TOOL_CALLS]' + c.function.name"))
    assert maker(None)


TOOL = ToolSpec("calculator", "Compute.", {"type": "object", "properties": {"expression": {"type": "string"}}})


@pytest.mark.parametrize("family", FAMILIES)
def test_rounds_of_calls_that_a_client_sends_back_go_on_from_the_tokens_that_were_sampled(family):
    template, parser = FAMILIES[family]
    tokenizer = marked_tokenizer(template)
    agent = Agent(tokenizer)
    tags = ("<think>", "</think>") if parser == "glm" else agent.thought_tags(None)
    reading = ResponseReader(
        decode=lambda ids: agent.decode_response(ids, ()), token_text=str, tool_parser=parser, thinking_tags=tags,
        opened=agent.forced_think_prefix(tags), marks=agent.marks,
    )  # fmt: skip
    graph, history, thought = MessageGraph(agent.chat), [Message("user", "Which?")], ""
    if parser in ("qwen_coder", "glm", "gemma", "harmony"):
        thought = "Hm."
    for number in range(3):
        place = graph.place(history, (TOOL,))
        assert (place.parent, place.change) == (number - 1 if number else None, None)
        assert place.text == agent.chat.text(history, (TOOL,))  # letter for letter what the template writes
        call = ToolCall(f"call{number:05d}", "calculator", '{"expression": "6*7"}')
        said = Message("assistant", "", (call,), reasoning=thought)
        text = agent.chat.response_text(history, said, (TOOL,))
        whole = agent.chat.unchecked([*history, said], (TOOL,), opens=False)
        end = whole[len(place.text) + len(text) :].strip() or "<|observation|>"  # GLM's next role ends a turn
        ids = ids_of(tokenizer, text + end)
        sampled = Completion(
            id="r", token_ids=ids, logprobs=(0.0,) * len(ids), versions=(0,) * len(ids), finish_reason="stop"
        )
        choice = reading.choice(ChatCall(model="policy", messages=tuple(history), tools=(TOOL,)), sampled)
        assert choice.message == replace(said, tool_calls=choice.message.tool_calls)
        assert [(made.name, json.loads(made.arguments)) for made in choice.message.tool_calls] == [
            ("calculator", {"expression": "6*7"})
        ]
        graph.grow(place, ids, choice.message)
        made = choice.message.tool_calls[0]
        history += [choice.message, Message("tool", f"r{number}", tool_call_id=made.id, name=made.name)]
