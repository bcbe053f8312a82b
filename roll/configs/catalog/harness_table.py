"""What agents' harnesses send by themselves that an endpoint would refuse, by name, for `ignore_fields`.

A name stands for the fields that the harness works without. Whoever writes it says: leave them out.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty")

HARNESSES: dict[str, tuple[str, ...]] = {
    "aider": ("temperature",),
    "autogen": (),
    "claude-code": ("context_management", "output_config", "temperature", "thinking"),
    "codex": ("tools.custom", "tools.image_generation", "tools.web_search"),
    "crewai": (),
    "dspy": (),
    "google-adk": (),
    "inspect-ai": (),
    "langchain": (),
    "langgraph": (),
    "litellm": (),
    "llama-index": ("temperature",),
    "mini-swe-agent": (),
    "openai-agents": (),
    "opencode": (),
    "openhands": (),
    "pydantic-ai": (),
    "qwen-code": (),
    "smolagents": ("tool_choice",),
    "strands": (),
}
"""Without fields: everything that it sends by itself is taken."""

SIDE_PROMPTS: dict[str, tuple[str, ...]] = {
    "aider": ("You are an expert software engineer that generates concise, one-line Git commit messages",),
    "opencode": ("You are a title generator. You output ONLY a thread title.",),
}
"""What the system messages of a harness's calls beside the task begin with (aider-chat 0.86.2, opencode 1.18.33)."""


def expand_fields(names: Iterable[str], *, trains: bool = True) -> frozenset[str]:
    """Return fields of requests, with those that names of harnesses stand for.

    Args:
        trains: false: parameters of sampling act, so harnesses' names don't stand for them.
    """
    fields: set[str] = set()
    for name in names:
        of_harness = HARNESSES.get(name)
        if of_harness is None:
            fields.add(name)
        else:
            fields.update(field for field in of_harness if trains or field not in _SAMPLING)
    return frozenset(fields)


def harness_meant(name: str) -> str | None:
    """Return the harness that a name which is none may mean; fields of requests have no dashes. None: a field."""
    if name in HARNESSES:
        return None
    near = difflib.get_close_matches(name.lower().replace("_", "-"), HARNESSES, 1, 0.85)
    return near[0] if near else next(iter(HARNESSES)) if "-" in name.split(".")[0] else None
