"""Options by which clients ask how a model should think and write. A policy has no such knobs but those of its chat
template, so they are read, checked, and act where they can; what would need more is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from roll.gateway.protocols import body_fields as f

NO_GRAMMAR = "the engines don't restrict what is sampled"
NO_EDITS = "the endpoint doesn't edit what the agent sends"
EFFORT = "the chat template's variable `reasoning_effort`, where it has one; otherwise the policy thinks as it does"
STRICT = ". `strict: true` is taken: arguments aren't forced to fit the schema, and clients check them"

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_VERBOSITIES = ("low", "medium", "high")
_SUMMARIES = ("auto", "concise", "detailed")
_SHOWN_OF_HOSTED = (
    "web_search_call.action.sources", "web_search_call.results", "code_interpreter_call.outputs",
    "computer_call_output.output.image_url", "file_search_call.results", "message.input_image.image_url",
)  # fmt: skip
"""What `include` may ask for that there is nothing of."""


def one_of(body: Mapping[str, Any], name: str, known: Collection[str], where: str = "") -> str | None:
    """Return one of some words, or None if it isn't there."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or value not in known:
        f.wrong(where + name, value, f"one of {', '.join(known)}")
    return value


def effort(body: Mapping[str, Any], name: str = "reasoning_effort", where: str = "") -> str | None:
    """Return how long to think, in OpenAI's and Anthropic's words."""
    return one_of(body, name, _EFFORTS, where)


def verbosity(body: Mapping[str, Any], where: str = "") -> None:
    """Check how much is to be written: the policy writes as it does."""
    one_of(body, "verbosity", _VERBOSITIES, where)


def check_format(value: Any, where: str, ignore_as: str) -> None:
    """Raise for any format of a response but text."""
    if value is None:
        return
    if f.mapping(value, where).get("type") != "text" or len(value) > 1:
        f.refuse_lost(where, f"{NO_GRAMMAR}; the format `text` is fine", ignore_as)


def reasoning(fields: Mapping[str, Any]) -> str | None:
    """Return the effort of Responses' `reasoning`. Thoughts are shown whatever is asked about them."""
    body = _known(fields.get("reasoning"), "reasoning", ("effort", "summary", "generate_summary", "context", "mode"))
    for name in ("summary", "generate_summary"):
        one_of(body, name, _SUMMARIES, "reasoning.")
    if body.get("context") not in (None, "auto", "all_turns"):  # thoughts stand in later prompts as they were sampled
        f.refuse_lost("reasoning.context", NO_EDITS, "reasoning")
    if body.get("mode") not in (None, "standard"):
        f.refuse_lost("reasoning.mode", "there is one way of sampling a response, which is the run's", "reasoning")
    return effort(body, "effort", "reasoning.")


def check_text(fields: Mapping[str, Any]) -> None:
    """Check Responses' `text`."""
    body = _known(fields.get("text"), "text", ("format", "verbosity"))
    check_format(body.get("format"), "text.format", "text")
    verbosity(body, "text.")


def check_include(fields: Mapping[str, Any]) -> None:
    """Check Responses' `include`: thoughts are shown anyway, and of tools that run at OpenAI there is nothing."""
    if "include" not in fields:
        return
    for i, name in enumerate(f.items(fields["include"], "include", 64)):
        if not isinstance(name, str):
            f.wrong(f"include[{i}]", name, "a text")
        if name != "reasoning.encrypted_content" and name not in _SHOWN_OF_HOSTED:
            f.refuse_lost("include", f"there is no {name[:80]} to show", "include")


def output_config(fields: Mapping[str, Any]) -> str | None:
    """Return the effort of Messages' `output_config`."""
    body = _known(fields.get("output_config"), "output_config", ("effort", "format"))
    if body.get("format") is not None:
        f.refuse_lost("output_config.format", NO_GRAMMAR, "output_config")
    return effort(body, "effort", "output_config.")


def check_thinking(fields: Mapping[str, Any]) -> None:
    """Check Messages' `thinking`: the policy thinks as it does, so a budget would be lost, and what it thinks is
    shown."""
    if "thinking" not in fields:
        return
    if f.mapping(fields["thinking"], "thinking").get("type") == "enabled":
        f.refuse_lost("thinking", "the policy thinks as it does, without a budget; `adaptive` and `disabled` are fine")
    body = _known(fields["thinking"], "thinking", ("type", "display"))
    if one_of(body, "type", ("adaptive", "disabled"), "thinking.") is None:
        f.wrong("thinking.type", None, "adaptive or disabled")
    one_of(body, "display", ("summarized", "omitted"), "thinking.")


def check_context_management(fields: Mapping[str, Any]) -> None:
    """Check Messages' `context_management`: edits that leave everything as it is are fine."""
    body = _known(fields.get("context_management"), "context_management", ("edits",))
    edits = body.get("edits")
    for i, value in enumerate([] if edits is None else f.items(edits, "context_management.edits", 64)):
        where = f"context_management.edits[{i}]"
        edit = f.mapping(value, where)
        keeps_all = edit.get("keep") in ("all", {"type": "all"})
        if edit.get("type") != "clear_thinking_20251015" or not keeps_all:
            f.refuse_lost(where, NO_EDITS, "context_management")


def _known(value: Any, where: str, names: Collection[str]) -> Mapping[str, Any]:
    """Return an object; one that isn't there is empty. Raises for what nobody reads in it."""
    body = {} if value is None else f.mapping(value, where)
    for name in body:
        if name not in names and body[name] is not None:
            f.refuse_lost(f"{where}.{name[:80]}", "this endpoint doesn't know it", where)
    return body
