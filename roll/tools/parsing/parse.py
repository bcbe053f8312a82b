"""The door to the forms of tool calls: by name, or by what the chat template writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roll.catalog.entries import implementation
from roll.catalog.tools import TOOL_PARSERS
from roll.tools.parsing.base import MAX_CALLS, MAX_CHARACTERS, CallProblem, Found, ParsedResponse
from roll.types.chat import ToolCall, ToolSpec

_MARKS = (
    ("qwen_coder", "<function="),
    ("hermes", "<tool_call>"),
    ("llama", "<|python_tag|>"),
    ("llama", '"parameters": '),
    ("json", "[TOOL_CALLS]"),
)
"""What a chat template holds that writes calls in a form; the first that is found decides."""


def parse_calls(text: str, parser: str, *, tools: Sequence[ToolSpec] = (), first: int = 0) -> ParsedResponse:
    """Take a response apart.

    Args:
        text: of the response without its thought (`split_thinking`): calls that are only thought of aren't made.
        parser: a name in `TOOL_PARSERS`, or `package.module:function` of the user's own.
        tools: what the policy was told it can call; forms that write bare text take the types from them. Calls of
            other tools are calls too: whoever makes them says that there is no such tool.
        first: number of the first call: those that the conversation has had. Ids are `call` and five digits: templates
            exist that take nothing but nine letters and digits.

    Raises `ValueError` for a parser that doesn't exist, and never for a text.
    """
    parse = implementation(TOOL_PARSERS, parser, key="tool_parser", kind="function")
    if len(text) > MAX_CHARACTERS:
        problem = CallProblem("too_long", f"a response of more than {MAX_CHARACTERS} characters is not read for calls")
        return ParsedResponse(text, (), (problem,))
    found: Found = parse(text, tools)
    if len(found.calls) > MAX_CALLS and not any(problem.kind == "too_many" for problem in found.problems):
        found.problem("too_many", f"more than {MAX_CALLS} tool calls in one response; the others were not read")
    calls = [ToolCall(f"call{first + i:05d}", name, said) for i, (name, said) in enumerate(found.calls[:MAX_CALLS])]
    content = "".join(found.content)
    return ParsedResponse(content.strip() if calls else content, tuple(calls), tuple(found.problems))


def detect_parser(chat_template: str | None) -> str | None:
    """Return the form in which a chat template writes calls; None: it writes none, or in a form that isn't known."""
    return next((name for name, mark in _MARKS if mark in (chat_template or "")), None)


def resolve_parser(name: str, tokenizer: Any) -> str:
    """Return the name of a parser; `auto` becomes that of the tokenizer's chat template, `hermes` for one that knows no
    tools.

    Raises `ValueError` if there is no such parser, or the template doesn't say.
    """
    if name == "auto":
        template = getattr(tokenizer, "chat_template", None)
        if isinstance(template, dict):  # several templates by name
            template = template.get("tool_use") or template.get("default")
        found = detect_parser(template)
        if found is None and "tools" not in (template or ""):
            return "hermes"  # a template without tools is told of them in this form
        if found is None:
            raise ValueError(
                "tool_parser: auto reads the form of tool calls off the tokenizer's chat template, and this one shows "
                f"none; write {', '.join(TOOL_PARSERS)}, whichever the model was trained with"
            )
        return found
    implementation(TOOL_PARSERS, name, key="tool_parser", kind="function")
    return name


def split_thinking(text: str, tags: tuple[str, str] | None) -> tuple[str, str]:
    """Return what a response thought, and what it said then.

    A thought may have been opened by the prompt; one that isn't closed goes to the end of the text. None: nothing is
    split off.
    """
    if tags is None:
        return "", text
    opening, closing = tags
    before, closed, after = text.partition(closing)
    if closed:
        lead, opened, thought = before.partition(opening)
        return (thought.strip(), lead + after.lstrip()) if opened else (before.strip(), after.lstrip())
    lead, opened, thought = text.partition(opening)
    return (thought.strip(), lead) if opened else ("", text)
