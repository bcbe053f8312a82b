"""Episodes as traces of trackio, which `trackio show` lists and searches: messages, numbers, and spans where there are
some."""

from __future__ import annotations

from typing import Any

from roll.workbench.view.spans import SPANS_FILE, SpanIndex, trace_id
from roll.workbench.view.transcripts import FAILED, Chosen, facts, messages


def write_trackio_traces(chosen: Chosen, project: str) -> None:
    """Add the episodes to a project of this machine, as a run that is called after the recorded one; needs trackio.

    Files lie where TRACKIO_DIR says, else in the user's cache. Exported again, they are there twice.
    """
    import trackio

    spans = SpanIndex(chosen.run.logs / SPANS_FILE)
    name = chosen.run.name
    run = trackio.init(project, name, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False)
    for step in chosen.steps:
        traces = [
            trackio.Trace(**trace_of(row, spans.trace(trace_id(row["trace"] or ""))))
            for row in chosen.rows
            if row["step"] == step
        ]
        if traces:
            run.log({chosen.kind: traces}, step=step)
    run.finish()


def trace_of(row: dict[str, Any], spans: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a trace is made of: `messages` as OpenAI writes them, `metadata`, `spans`."""
    failed = row["status"] in FAILED
    about = {
        **facts(row),
        "task": row["task_id"],
        "ground_truth": row["ground_truth"] or None,
        "explanation": row["explanation"] or None,
        "error": row["error"] or None,
        "reward_parts": row["reward_parts"] or {},
        "status": "error" if failed else "ok",
        "episode_status": row["status"],
        "duration_ms": 1000 * sum((row["spans"] or {}).values()),
    }
    return {
        "messages": [_message(message) for message in messages(row)],
        "metadata": {name: value for name, value in about.items() if value is not None},
        "spans": [_span(span) for span in spans],
    }


def _message(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
        for call in message.get("tool_calls") or ()
    ]
    return {"role": message["role"], "content": message["content"], **({"tool_calls": calls} if calls else {})}


def _span(span: dict[str, Any]) -> dict[str, Any]:
    kind = "generation" if span["name"] == "generate" else "tool" if span["name"].startswith("tool") else "span"
    return {
        "id": span["id"],
        "parent_id": span["parent"],
        "name": span["name"],
        "kind": kind,
        "duration_ms": 1000 * span["seconds"],
        "status": "error" if span["failed"] else "ok",
        "metadata": {**span["attributes"], "start_ms": 1000 * span["start"]},
    }
