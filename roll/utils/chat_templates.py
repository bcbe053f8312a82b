"""Chat templates: how they are rendered, and which variables of their own they read.

A template is Jinja over `messages`, rendered in the sandbox of transformers' chat templates. Some read more than the
messages (`enable_thinking`, `reasoning_effort`): `chat_template_kwargs`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

TEMPLATE_DATE = datetime(2024, 7, 26)
"""Today, for chat templates: what Llama's fall back to."""
_ANY_DATE = "%d %b %Y"
_OUR_DATE = (
    "{% macro strftime_now(format) -%}{{ roll_dates[format] if format in roll_dates else roll_dates['"
    + _ANY_DATE
    + "'] }}{%- endmacro +%}"
)
"""In front of a template; `+` keeps the line end that it may begin with."""

RESERVED_VARIABLES = frozenset({
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs", "strftime_now", "raise_exception",
    "roll_dates",
})  # fmt: skip
"""What the caller of a template says, or transformers' own arguments: never variables of a user."""
_PYTHON_NAMES = frozenset({"namespace", "range", "dict", "lipsum", "cycler", "joiner"})


class VariableError(ValueError):
    """`chat_template_kwargs` that a chat template doesn't read."""


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    template: str = "",
    opens_answer: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation with a Jinja template, or with the tokenizer's own.

    Raises jinja2's errors, also where the template computes what can't be, and `TypeError` or `ValueError` for values
    that a filter doesn't take.

    `tools` are in OpenAI's form, `variables` what the template reads besides (`chat_template_kwargs`).

    Templates that write the date get `TEMPLATE_DATE`: the same conversation is the same text on any day.
    """
    calls = any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)
    # Of several templates by name, `tool_use` is for conversations with tools; others have one for all.
    template = template or tokenizer.get_chat_template(tools=[{}] if tools or calls else None)
    dates = {}
    if "strftime_now" in template:
        # transformers gives templates a function of that name, and newer ones (5.23) take no function as a variable.
        formats = [quoted[1:-1] for quoted in re.findall(r"""strftime_now\(\s*("[^"]*"|'[^']*')""", template)]
        dates = {"roll_dates": {each: TEMPLATE_DATE.strftime(each) for each in (*formats, _ANY_DATE)}}
        template = _OUR_DATE + template

    def rendered(some: Sequence[Mapping[str, Any]]) -> str:
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in some],
            chat_template=template,
            tokenize=False,
            add_generation_prompt=opens_answer,
            **({"tools": [dict(tool) for tool in tools]} if tools else {}),
            **dates,
            **(variables or {}),
        )
        return text

    try:
        try:
            return rendered(messages)
        except TypeError:
            if not any(message.get("tool_calls") for message in messages):
                raise
            return rendered(with_text_arguments(messages))  # DeepSeek's take the arguments of calls as JSON text alone
    except (ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        from jinja2.exceptions import TemplateError

        raise TemplateError(f"{type(error).__name__}: {error}") from error


def with_text_arguments(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages with the arguments of all tool calls as JSON text."""
    return [
        {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"].get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def check_variables(
    variables: Mapping[str, Any], template: str, special: Sequence[str] = (), *, what: str = "the chat template"
) -> None:
    """Raise `VariableError` for variables that a template doesn't read; `special`: names of special tokens, which
    every template may read and nobody sets."""
    if reserved := sorted(name for name in variables if name in RESERVED_VARIABLES):
        raise VariableError(f"{reserved[0]!r} isn't a variable of chat templates: it is decided elsewhere; remove it")
    known = template_variables(template)
    if known is None:
        return  # Jinja that can't be read here is reported when it is rendered
    known -= set(special)
    if unknown := sorted(set(variables) - known):
        reads = f"it reads {', '.join(sorted(known))}" if known else "it reads none"
        raise VariableError(f"{what} doesn't read the variable {unknown[0]!r}; {reads}")


def template_variables(template: str) -> set[str] | None:
    """Return the variables that a template reads, without those that every caller gives; None for Jinja that can't be
    parsed."""
    names = _undeclared(template)
    return None if names is None else set(names)


def template_environment() -> Any:
    """Return a sandbox of jinja2 that takes what chat templates are written in."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}`, transformers' mark around what the assistant says."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])


@lru_cache(maxsize=64)
def _undeclared(template: str) -> frozenset[str] | None:
    import jinja2
    from jinja2 import meta, nodes

    try:
        tree = template_environment().parse(template)
        names = meta.find_undeclared_variables(tree)
    except (jinja2.TemplateError, RecursionError):
        return None
    # Jinja counts what is set in a loop or a branch; that is the template's own unless it asks whether it was given.
    own = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    tests = [test.node for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined")]
    tests += [use.node for use in tree.find_all(nodes.Filter) if use.name in ("default", "d") and use.node is not None]
    asked = {node.name for node in tests if isinstance(node, nodes.Name)}
    return frozenset(names) - (own - asked) - RESERVED_VARIABLES - _PYTHON_NAMES
