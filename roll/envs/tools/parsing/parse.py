"""The door to the forms of tool calls, by name; `roll/rollout/tool_forms.py` finds the name for a chat template."""

from __future__ import annotations

from collections.abc import Sequence

from roll.configs.catalog.entries import implementation
from roll.configs.catalog.tool_table import TOOL_PARSERS
from roll.envs.tools.parsing.base import MAX_CALLS, MAX_CHARACTERS, CallProblem, Extraction, ParsedResponse
from roll.types.chat import ToolCall, ToolSpec


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
    extracted: Extraction = parse(text, tools)
    if len(extracted.calls) > MAX_CALLS and not any(problem.kind == "too_many" for problem in extracted.problems):
        extracted.problem("too_many", f"more than {MAX_CALLS} tool calls in one response; the others were not read")
    calls = [
        ToolCall(f"call{first + i:05d}", name, arguments)
        for i, (name, arguments) in enumerate(extracted.calls[:MAX_CALLS])
    ]
    content = "".join(extracted.content)
    return ParsedResponse(
        content.strip() if calls or extracted.thought else content,
        tuple(calls),
        tuple(extracted.problems),
        extracted.thought,
    )


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
