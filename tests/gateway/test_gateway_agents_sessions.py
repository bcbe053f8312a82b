"""What answers an agent's calls reads them in the form of the model's chat template, or says that it can't."""

from __future__ import annotations

import pytest
from tiny_models import char_tokenizer

from roll.configs.schema.agents_config import AgentEnv
from roll.gateway.agents.sessions import session_maker
from roll.rollout.agent import Agent

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
