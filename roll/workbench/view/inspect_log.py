"""Episodes as a log of Inspect (inspect.aisi.org.uk), for `inspect view` and its data frames: version 2 of its format.

A `.json` file is one object, in this order of fields; a `.eval` file is an archive of the same parts:

    header.json                          the object without its samples
    samples/<id>_epoch_<epoch>.json      a sample each
    summaries.json                       what lists of samples show
    _journal/start.json                  version, eval and plan

A sample is a task; its epoch is the member of the group, counted from 1.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import zipfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from roll import __version__
from roll.workbench.view.transcripts import FAILED, Chosen, arguments_of, facts, messages

VERSION = 2
SCORER = "reward"
_STOP = {"stop": "stop", "length": "max_tokens", "tool_calls": "tool_calls"}
_SUMMARY_CHARACTERS = 1000
_NO_NAME = re.compile(r"[/\\\x00-\x1f]")
_MAX_NAME_BYTES = 200


def write_inspect_log(chosen: Chosen, file: Path) -> None:
    """Write a log; `file` ends in `.eval` or `.json` and is there whole or not at all."""
    header, samples = inspect_log(chosen)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(file.name + ".tmp")
    if file.suffix == ".json":
        temporary.write_text(_json({**header, "samples": samples}), encoding="utf-8")
    else:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
            start = {name: header[name] for name in ("version", "eval", "plan")}
            archive.writestr("_journal/start.json", _json(start))
            for sample in samples:
                archive.writestr(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", _json(sample))
            archive.writestr("summaries.json", _json([_summary(sample) for sample in samples]))
            archive.writestr("header.json", _json(header))
    temporary.replace(file)


def inspect_log(chosen: Chosen) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the log without its samples, and the samples."""
    run, about = chosen.run, chosen.run.about()
    name = str(about.get("exp_name") or run.name)
    written = [datetime.fromtimestamp(at, UTC).isoformat() for at in _times(chosen)]
    several = len(chosen.steps) > 1
    samples = _distinct([_sample(row, name, several) for row in chosen.rows])
    rewards = [row["reward"] for row in chosen.rows if row["reward"] is not None and row["status"] not in FAILED]
    steps = ", ".join(map(str, chosen.steps))
    failed = sum(sample["error"] is not None for sample in samples)
    task = f"{name} {chosen.kind}"
    header = {
        "version": VERSION,
        "status": "success",
        "eval": {
            "run_id": f"{name}-{chosen.kind}",
            "created": written[0],
            "task": task,
            "task_id": f"{task} {steps}",
            "task_version": 0,
            "task_args": {"steps": list(chosen.steps), "kind": chosen.kind},
            "dataset": {
                "name": task,
                "samples": len({sample["id"] for sample in samples}),
                "sample_ids": list(dict.fromkeys(sample["id"] for sample in samples)),
                "shuffled": False,
            },
            "model": f"roll/{name}",
            "model_args": {},
            "config": {"epochs": max((sample["epoch"] for sample in samples), default=1)},
            "packages": {"roll": __version__},
            "metadata": {"steps": list(chosen.steps), "kind": chosen.kind, "left_out": chosen.left_out},
        },
        "plan": {"name": "plan", "steps": [], "config": {}},
        "results": {
            "total_samples": len(samples),
            "completed_samples": len(samples) - failed,
            "scores": [
                {
                    "name": SCORER,
                    "scorer": SCORER,
                    "params": {},
                    "metrics": {"mean": {"name": "mean", "value": fmean(rewards) if rewards else 0.0, "options": {}}},
                }
            ],
        },
        "stats": {
            "started_at": written[0],
            "completed_at": written[1],
            "model_usage": {f"roll/{name}": _usage(chosen.rows)},
        },
    }
    return header, samples


def _times(chosen: Chosen) -> tuple[float, float]:
    """Return when the run began, and when it last said something, in seconds since 1970."""
    state, about = chosen.run.state(), chosen.run.about()
    end = float(state["since"] or 0.0)
    return float(about.get("started") or end), end


def _sample(row: dict[str, Any], model: str, several: bool) -> dict[str, Any]:
    exchange = messages(row)
    shown = [_message(message, position, model) for position, message in enumerate(exchange)]
    before = next(
        (position for position, message in enumerate(exchange) if message["role"] == "assistant"), len(exchange)
    )
    last = next((message for message in reversed(shown) if message["role"] == "assistant"), None)
    failed = row["status"] in FAILED
    context = row["row_id"][len(f"{row['task_id']}#{row['member']}") :]
    words = row["error"] or row["dropped"] or row["status"]
    return {
        "id": _id(row["task_id"] + context + (f"@{row['step']}" if several else "")),
        "epoch": row["member"] + 1,
        "input": shown[:before] if before else "",
        "target": row["ground_truth"] or "",
        "messages": shown,
        "output": {
            "model": f"roll/{model}",
            "choices": [{"message": last, "stop_reason": _stop(row), **_logprobs(row)}] if last else [],
            "usage": _usage([row]),
        },
        "scores": None if failed or row["reward"] is None else {SCORER: _score(row)},
        "metadata": facts(row),
        "store": {},
        "events": [],
        "model_usage": {f"roll/{model}": _usage([row])},
        "error": {"message": words.partition("\n")[0], "traceback": words, "traceback_ansi": words} if failed else None,
        "attachments": {},
    }


def _id(name: str) -> str:
    """Return a name that the file of a sample may have: without folders and characters that end it, and short."""
    name = _NO_NAME.sub("_", name)
    if len(name.encode()) > _MAX_NAME_BYTES:
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        name = name.encode()[:_MAX_NAME_BYTES].decode(errors="ignore") + "~" + digest
    return name


def _distinct(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give a number to those with the same id and epoch: a sample's file is named by both."""
    taken: set[tuple[str, int]] = set()
    counts: dict[tuple[str, int], int] = {}
    for sample in samples:
        name, epoch = sample["id"], sample["epoch"]
        while (sample["id"], epoch) in taken:
            counts[name, epoch] = counts.get((name, epoch), 1) + 1
            sample["id"] = f"{name}~{counts[name, epoch]}"
        taken.add((sample["id"], epoch))
    return samples


def _message(message: dict[str, Any], position: int, model: str) -> dict[str, Any]:
    entry = {"id": f"message-{position}", "role": message["role"], "content": message["content"]}
    if message["role"] == "assistant":
        entry |= {"source": "generate", "model": f"roll/{model}"}
    calls = []
    for number, call in enumerate(message.get("tool_calls") or ()):
        arguments, wrong = arguments_of(call["arguments"])
        name = call["name"] or "unknown"
        one = {
            "id": call["id"] or f"call-{position}-{number}",
            "function": name,
            "arguments": arguments,
            "type": "function",
        }
        calls.append(one | ({"parse_error": wrong} if wrong else {}))
    return entry | ({"tool_calls": calls} if calls else {})


def _score(row: dict[str, Any]) -> dict[str, Any]:
    parts = {**(row["reward_parts"] or {}), **{f"role {k}": v for k, v in (row["role_rewards"] or {}).items()}}
    return {
        "value": row["reward"],
        "answer": row["answer"] or None,
        "explanation": row["explanation"] or None,
        "metadata": parts,
    }


def _stop(row: dict[str, Any]) -> str:
    return _STOP.get(row["finish_reason"], "unknown")


def _logprobs(row: dict[str, Any]) -> dict[str, Any]:
    """Return the engine's log-probs of the last response's tokens; nothing where they aren't recorded."""
    turns, texts, logprobs = row["turns"] or [], row["token_texts"] or [], row["sampling_logprobs"] or []
    if not turns or len(texts) != len(logprobs):
        return {}
    start = turns[-1]["start"] + turns[-1]["prompt_tokens"]
    tokens = list(zip(texts, logprobs, strict=True))[start : start + turns[-1]["response_tokens"]]
    return {"logprobs": {"content": [{"token": text, "logprob": logprob} for text, logprob in tokens]}}


def _usage(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    total = sum(row["num_tokens"] or 0 for row in rows)
    output = sum(row["num_response_tokens"] or 0 for row in rows)
    return {"input_tokens": total - output, "output_tokens": output, "total_tokens": total}


def _summary(sample: dict[str, Any]) -> dict[str, Any]:
    """Return what a list of samples shows."""
    scores = sample["scores"]
    return {
        "id": sample["id"],
        "epoch": sample["epoch"],
        "input": sample["input"] if isinstance(sample["input"], str) else sample["input"][-1]["content"],
        "target": sample["target"],
        "metadata": {
            name: value[:_SUMMARY_CHARACTERS] if isinstance(value, str) else value
            for name, value in sample["metadata"].items()
        },
        "scores": None if scores is None else {SCORER: {"value": scores[SCORER]["value"]}},
        "model_usage": sample["model_usage"],
        "error": sample["error"]["message"] if sample["error"] else None,
        "completed": True,
        "message_count": len(sample["messages"]),
    }


def _json(value: Any) -> str:
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    """Return a value as JSON has it: numbers that aren't finite become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
