"""`chat_template_kwargs` of a request: read, rendered over the run's, apart from the conversations of other calls."""

from __future__ import annotations

import asyncio

import pytest
from test_gateway_session import Engines, ask, ids_of
from tiny_models import CHATML, char_tokenizer

from roll.configs.schema.agents_config import AgentEnv
from roll.data.templates import TemplateError
from roll.gateway.agents.sessions import session_maker
from roll.gateway.base import RefusedCall
from roll.gateway.protocols.openai_chat import ChatCompletions
from roll.rollout.agent import Agent
from roll.rollout.chat_format import ChatTemplate
from roll.rollout.episode import Episode, EpisodeKey
from roll.strategies.base import SamplingParams
from roll.types.chat import Message
from roll.types.trajectory import Task

OPENS = CHATML.replace(
    "assistant\n{% endif %}",
    "assistant\n{% if thinks is defined and not thinks %}<think></think>{% else %}<think>{% endif %}{% endif %}",
)
HELLO = Message("user", "hello")


def tokenizer():
    own = char_tokenizer()
    own.chat_template = OPENS
    return own


def make(*replies: str, variables=None):
    own, engines = tokenizer(), Engines(*replies)
    agent = Agent(own, variables=variables)
    key = EpisodeKey(seed=1, purpose="train", step=1, position=0, member=0)
    task = Task(id="t", source="s", payload={}, seed=0, tag="a", domain="a")
    episode = Episode(engines, agent, None, task, key, SamplingParams(max_new_tokens=100), 2000)
    env = AgentEnv(agent="x:y")
    session = session_maker(env, agent, own, thinking_tags=("<think>", "</think>"), models={})(episode)
    return session, episode, engines, own


def prompts(engines, own) -> list[str]:
    return [own.decode(request.prompt_ids) for request in engines.requests]


def test_a_body_has_the_field_that_vllms_server_has():
    chat = ChatCompletions()
    body = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
    assert chat.read(body, ()).call.template_variables == {}
    asked = chat.read({**body, "chat_template_kwargs": {"thinks": False}}, ())
    assert asked.call.template_variables == {"thinks": False}
    with pytest.raises(RefusedCall, match="chat_template_kwargs"):
        chat.read({**body, "chat_template_kwargs": "off"}, ())
    assert (
        chat.read(
            {**body, "chat_template_kwargs": {"thinks": False}}, ("chat_template_kwargs",)
        ).call.template_variables
        == {}
    )


def test_a_requests_variables_come_over_the_runs_and_say_whether_its_response_is_a_thought():
    session, _, engines, own = make("why</think>yes", "yes")
    first = asyncio.run(session.complete(ask(HELLO)))
    second = asyncio.run(session.complete(ask(HELLO, template_variables={"thinks": False})))
    assert prompts(engines, own)[0].endswith("assistant\n<think>")
    assert prompts(engines, own)[1].endswith("assistant\n<think></think>")
    assert (first.choices[0].message.reasoning, first.choices[0].message.content) == ("why", "yes")
    assert (second.choices[0].message.reasoning, second.choices[0].message.content) == ("", "yes")
    told, _, engines, own = make("why</think>yes", variables={"thinks": False})
    asyncio.run(told.complete(ask(HELLO, template_variables={"thinks": True})))
    assert prompts(engines, own)[0].endswith("assistant\n<think>")


def test_calls_with_the_same_variables_share_a_context_and_others_begin_one():
    session, episode, engines, _ = make("yes", "no", "so</think>well")
    off = {"template_variables": {"thinks": False}}
    first = asyncio.run(session.complete(ask(HELLO, **off))).choices[0]
    history = (HELLO, first.message, Message("user", "more"))
    asyncio.run(session.complete(ask(*history, **off)))
    asyncio.run(session.complete(ask(*history)))
    episode.finish(1.0)
    contexts = episode.finished().contexts
    assert [len(turns) for turns in contexts] == [2, 1]
    assert engines.requests[1].prompt_ids[: len(engines.requests[0].prompt_ids)] == engines.requests[0].prompt_ids
    assert ids_of("yes")[0] in engines.requests[1].prompt_ids


def test_a_variable_that_the_template_doesnt_read_is_refused_with_its_field():
    session, *_ = make("yes")
    with pytest.raises(RefusedCall, match="doesn't read the variable 'enable_thinking'; it reads thinks") as caught:
        asyncio.run(session.complete(ask(HELLO, template_variables={"enable_thinking": False})))
    assert (caught.value.status, caught.value.field) == (400, "chat_template_kwargs")


@pytest.mark.parametrize("size", [0, "two", 10**6])
def test_a_value_that_the_template_cannot_use_is_the_requests_fault(size):
    own = tokenizer()
    # 12 // 0, 12 // "two", and a range that the sandbox refuses.
    own.chat_template = "{% for k in range(12 // (size | default(1)) + (size | default(1))) %}{% endfor %}" + OPENS
    template = ChatTemplate(own).with_variables({"size": size})
    with pytest.raises(TemplateError, match="refuses a conversation of user"):
        template.prompt([HELLO])


def test_how_long_to_think_acts_where_the_template_has_a_variable_for_it(monkeypatch):
    reads = "{% if reasoning_effort is defined %}Reasoning: {{ reasoning_effort }}{% endif %}" + OPENS
    calls = (ask(HELLO), ask(HELLO, effort="high"), ask(HELLO, effort="low"),
             ask(HELLO, effort="low", template_variables={"reasoning_effort": "max"}))  # fmt: skip
    shown = []
    for template in (reads, OPENS):
        monkeypatch.setitem(globals(), "OPENS", template)
        session, _, engines, own = make(*["a</think>b"] * 4)
        for call in calls[: 4 if template is reads else 3]:
            asyncio.run(session.complete(call))
        shown.append([prompt.partition("Reasoning: ")[2].partition("<")[0] for prompt in prompts(engines, own)])
    assert shown == [["", "high", "low", "max"], ["", "", ""]]
