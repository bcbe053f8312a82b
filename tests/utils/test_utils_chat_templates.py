"""Which variables a chat template reads."""

from __future__ import annotations

import pytest

from roll.utils.chat_templates import VariableError, check_variables, template_variables

READS = {
    # template: variables of its own
    "{% if enable_thinking is defined and not enable_thinking %}x{% endif %}": {"enable_thinking"},
    "{% if not effort is defined %}{% set effort = 'low' %}{% endif %}{{ effort }}": {"effort"},
    "{% set thinks = thinks | default(true) %}{{ thinks }}": {"thinks"},
    "{% macro a(x) %}{{ x }}{{ identity }}{% endmacro %}{{ a(1) }}": {"identity"},
    "{{ date_string }}": {"date_string"},
    "{% for m in messages %}{% set text = m.content %}{{ text }}{% endfor %}": set(),
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}": set(),
    "{% set ns = namespace(a=1) %}{% if tools %}{{ raise_exception('no') }}{% endif %}{{ strftime_now('%Y') }}": set(),
    "{% if add_generation_prompt %}{% for i in range(2) %}{% continue %}{% endfor %}{% endif %}": set(),
}


@pytest.mark.parametrize("template", READS)
def test_variables_are_what_a_template_reads_and_nobody_else_gives(template: str) -> None:
    assert template_variables(template) == READS[template]


def test_what_a_template_doesnt_read_is_refused_with_what_it_reads() -> None:
    template = "{{ bos_token }}{% if enable_thinking is defined %}{{ reasoning_effort }}{% endif %}"
    check_variables({"enable_thinking": False, "reasoning_effort": "low"}, template, ["bos_token"])
    with pytest.raises(VariableError, match="'thinking'; it reads enable_thinking, reasoning_effort"):
        check_variables({"thinking": False}, template, ["bos_token"])
    with pytest.raises(VariableError, match="'bos_token'"):
        check_variables({"bos_token": "<s>"}, template, ["bos_token"])
    with pytest.raises(VariableError, match="'tools' isn't a variable of chat templates"):
        check_variables({"tools": []}, "{{ tools }}")
    with pytest.raises(VariableError, match="it reads none"):
        check_variables({"a": 1}, "{{ messages }}")


def test_what_cant_be_parsed_is_left_to_whoever_renders_it() -> None:
    assert template_variables("{% if %}") is None
    check_variables({"a": 1}, "{% if %}")
