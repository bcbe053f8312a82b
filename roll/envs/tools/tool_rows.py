"""What the columns of a row say about tools, in verl's form: `agent_name`, `tools_kwargs`, `interaction_kwargs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SINGLE_TURN, TOOL_AGENT = "single_turn_agent", "tool_agent"


def row_tools(payload: Mapping[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    """Return which of its domain's tools a row can call: none for `agent_name: single_turn_agent`, else all.

    Raises `ValueError` for an `agent_name` that isn't known.
    """
    agent = _column(payload, "agent_name")
    if agent == SINGLE_TURN:
        return ()
    if agent in (None, "", TOOL_AGENT):
        return tuple(names)
    raise ValueError(
        f"agent_name {agent!r} isn't known; expected {TOOL_AGENT} or {SINGLE_TURN}. Another way to play a domain's "
        "episodes is rewards.<domain>.rollout"
    )


def row_tool_kwargs(payload: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what a row says of each tool: its `create_kwargs` and `execute_kwargs` together, or all of it where it has
    neither. Raises `ValueError`."""
    tools = _mapping(payload, "tools_kwargs")
    result = {}
    for name, of_tool in tools.items():
        if of_tool is None:
            continue  # parquet has a column for every tool that some row names
        if not isinstance(of_tool, Mapping):
            raise ValueError(f"tools_kwargs.{name} must have keys, got {of_tool!r:.80}")
        parts = {key: value for key, value in of_tool.items() if value is not None}
        nested = [parts.pop(key) for key in ("create_kwargs", "execute_kwargs") if key in parts]
        for key in ("calc_reward_kwargs", "release_kwargs"):
            if nested and parts.pop(key, None):
                raise ValueError(f"tools_kwargs.{name}.{key}: tools take create_kwargs and execute_kwargs only")
        if nested and parts:
            raise ValueError(f"tools_kwargs.{name}: {next(iter(parts))!r} stands beside create_kwargs, not in it")
        result[name] = {k: v for one in nested for k, v in dict(one).items() if v is not None} if nested else parts
    return result


def row_interaction(payload: Mapping[str, Any], default: str | None) -> tuple[str | None, dict[str, Any]]:
    """Return who plays the user of a row (None: nobody), and what the row says to them. Raises `ValueError`."""
    kwargs = {key: value for key, value in _mapping(payload, "interaction_kwargs").items() if value is not None}
    name = kwargs.get("name", default)
    if kwargs and name is None:
        raise ValueError("interaction_kwargs without a name; add it, or set rewards.<domain>.interaction")
    return (None if name is None else str(name)), kwargs


def _column(payload: Mapping[str, Any], name: str) -> Any:
    """Return a column, or the entry of that name in verl's `extra_info`."""
    value = payload.get(name)
    extra = payload.get("extra_info")
    return extra.get(name) if value is None and isinstance(extra, Mapping) else value


def _mapping(payload: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = _column(payload, name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must have keys, got {value!r:.80}")
    return value
