"""Episodes as logs of Inspect and as traces of trackio: what is written, and what the tools read back."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from recorded_run import group, row, write_run

from roll.cli.__main__ import main
from roll.workbench.view.export import demo_runs
from roll.workbench.view.transcripts import arguments_of

TEXT, NUMBER, WHOLE = {"type": "string"}, {"type": "number"}, {"type": "integer"}
MAYBE_TEXT = {"type": ["string", "null"]}


def thing(needed: dict[str, Any], **optional: Any) -> dict[str, Any]:
    properties = {**needed, **optional}
    return {"type": "object", "required": list(needed), "properties": properties, "additionalProperties": False}


# The fields of Inspect's format, version 2, that these logs use, with their types; written down from its documentation.
USAGE = thing({"input_tokens": WHOLE, "output_tokens": WHOLE, "total_tokens": WHOLE})
CALL = thing({"id": TEXT, "function": TEXT, "arguments": {"type": "object"}, "type": TEXT}, parse_error=TEXT)
MESSAGE = thing(
    {"role": {"enum": ["user", "assistant"]}, "content": TEXT},
    id=TEXT,
    source={"enum": ["generate"]},
    model=TEXT,
    tool_calls={"type": "array", "items": CALL, "minItems": 1},
)
LOGPROB = thing({"token": TEXT, "logprob": NUMBER})
CHOICE = thing(
    {"message": MESSAGE, "stop_reason": {"enum": ["stop", "max_tokens", "tool_calls", "unknown"]}},
    logprobs=thing({"content": {"type": "array", "items": LOGPROB}}),
)
SCORE = thing({"value": NUMBER, "answer": MAYBE_TEXT, "explanation": MAYBE_TEXT, "metadata": {"type": "object"}})
ERROR = thing({"message": TEXT, "traceback": TEXT, "traceback_ansi": TEXT})
SAMPLE = thing(
    {
        "id": TEXT,
        "epoch": {"type": "integer", "minimum": 1},
        "input": {"anyOf": [TEXT, {"type": "array", "items": MESSAGE}]},
        "target": TEXT,
        "messages": {"type": "array", "items": MESSAGE},
        "output": thing({"model": TEXT, "choices": {"type": "array", "items": CHOICE}, "usage": USAGE}),
        "scores": {"anyOf": [{"type": "null"}, thing({"reward": SCORE})]},
        "metadata": {"type": "object"},
        "store": {"type": "object"},
        "events": {"type": "array"},
        "model_usage": {"type": "object", "additionalProperties": USAGE},
        "error": {"anyOf": [{"type": "null"}, ERROR]},
        "attachments": {"type": "object"},
    }
)
DATASET = thing({"name": TEXT, "samples": WHOLE, "sample_ids": {"type": "array", "items": TEXT}, "shuffled": {}})
EVAL = thing(
    {
        "run_id": TEXT, "created": {"type": "string", "format": "date-time"}, "task": TEXT, "task_id": TEXT,
        "task_version": WHOLE, "task_args": {"type": "object"}, "dataset": DATASET, "model": TEXT,
        "model_args": {"type": "object"}, "config": thing({"epochs": WHOLE}), "packages": {"type": "object"},
        "metadata": {"type": "object"},
    }
)  # fmt: skip
METRIC = thing({"name": TEXT, "value": NUMBER, "options": {"type": "object"}})
SCORER = thing(
    {"name": TEXT, "scorer": TEXT, "params": {}, "metrics": {"type": "object", "additionalProperties": METRIC}}
)
HEADER = {
    "version": {"const": 2},
    "status": {"const": "success"},
    "eval": EVAL,
    "plan": thing({"name": TEXT, "steps": {"type": "array"}, "config": {"type": "object"}}),
    "results": thing(
        {"total_samples": WHOLE, "completed_samples": WHOLE, "scores": {"type": "array", "items": SCORER}}
    ),
    "stats": thing({"started_at": TEXT, "completed_at": TEXT, "model_usage": {"type": "object"}}),
}
LOG = thing({**HEADER, "samples": {"type": "array", "items": SAMPLE}})


def turn(number: int, start: int, prompt: str, response: str, **more: Any) -> dict[str, Any]:
    about = {"number": number, "start": start, "prompt_tokens": 3, "response_tokens": 2, "reward": 0.0}
    return {**about, "prompt": prompt, "response": response, "finish_reason": "stop", "resets_context": False, **more}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    calls = [{"id": "c1", "name": "add", "arguments": '{"a": 2}'}, {"id": "", "name": "add", "arguments": "{a"}]
    turns = [turn(0, 0, "Two plus two", "", tool_calls=calls), turn(1, 5, "4", "It is four.", observation="Well done.")]
    agent = row(
        "room/1", 1, 1.0, 0.5, answer="four", explanation="right", num_turns=2, turns=turns, num_tokens=10,
        num_response_tokens=4, token_ids=list(range(10)), action_mask=[False] * 10, loss_mask=[False] * 10,
        versions=[0] * 10, sampling_logprobs=[-0.125 * i for i in range(10)], old_logprobs=[], advantages=[],
    )  # fmt: skip
    lost = row("room/1", 0, 0.0, 0.0, status="env_error", error="RuntimeError: locked\nTraceback", dropped="locked")
    steps = {1: group("sums:1", 1.0, 0.0), 2: [*group("sums:1", 0.0, 1.0, 1.0), agent]}
    return write_run(tmp_path / "run", steps, others={("dropped", 2): [lost]})


def test_a_log_of_inspect_has_the_messages_scores_and_logprobs_of_the_last_step(run, tmp_path, capsys):
    file = tmp_path / "out" / "log.json"
    assert main(["view", str(run), "--export", str(file)]) == 0
    assert "4 episodes" in capsys.readouterr().err
    log = json.loads(file.read_text(encoding="utf-8"))
    jsonschema.validate(log, LOG)
    assert list(log) == [*HEADER, "samples"], "Inspect reads the header of a large file up to its samples"
    assert [(one["id"], one["epoch"]) for one in log["samples"]] == [
        ("sums:1", 1), ("sums:1", 2), ("sums:1", 3), ("room_1", 2)
    ]  # fmt: skip
    assert log["results"]["scores"][0]["metrics"]["mean"]["value"] == 0.75, "(0 + 1 + 1 + 1) / 4"
    agent = log["samples"][3]
    assert [message["role"] for message in agent["messages"]] == ["user", "assistant", "user", "assistant", "user"]
    assert [call["arguments"] for call in agent["messages"][1]["tool_calls"]] == [{"a": 2}, {"text": "{a"}]
    assert agent["messages"][1]["tool_calls"][1]["parse_error"].startswith("no JSON")
    assert agent["input"] == agent["messages"][:1] and agent["messages"][-1]["content"] == "Well done."
    assert agent["output"]["choices"][0]["message"]["content"] == "It is four."
    # The last turn begins at token 5 and was shown 3 tokens; its response is tokens 8 and 9.
    assert [one["logprob"] for one in agent["output"]["choices"][0]["logprobs"]["content"]] == [-1.0, -1.125]
    assert agent["scores"]["reward"] == {
        "value": 1.0, "answer": "four", "explanation": "right", "metadata": {"correct": 1.0}
    }  # fmt: skip
    assert agent["output"]["usage"] == {"input_tokens": 6, "output_tokens": 4, "total_tokens": 10}


def test_an_archive_has_the_same_parts_and_a_failed_episode_is_an_error_without_a_score(run, tmp_path):
    file = tmp_path / "log.eval"
    assert main(["view", str(run), "--export", str(file), "--kind", "dropped"]) == 0
    with zipfile.ZipFile(file) as archive:
        assert sorted(archive.namelist()) == [
            "_journal/start.json", "header.json", "samples/room_1_epoch_1.json", "summaries.json"
        ]  # fmt: skip
        header = json.loads(archive.read("header.json"))
        sample = json.loads(archive.read("samples/room_1_epoch_1.json"))
        (summary,) = json.loads(archive.read("summaries.json"))
        start = json.loads(archive.read("_journal/start.json"))
    jsonschema.validate(header, thing(HEADER))
    jsonschema.validate(sample, SAMPLE)
    assert start == {name: header[name] for name in ("version", "eval", "plan")}
    assert sample["scores"] is None and sample["error"]["message"] == "RuntimeError: locked"
    assert (summary["error"], summary["completed"], summary["input"]) == ("RuntimeError: locked", True, "Two plus two")
    assert header["results"]["completed_samples"] == 0


def test_samples_of_several_steps_are_told_apart_and_what_is_left_out_is_said(run, tmp_path, capsys):
    file = tmp_path / "log.json"
    assert main(["view", str(run), "--export", str(file), "--steps", "1", "2", "--episodes", "3"]) == 0
    assert "3 episodes" in capsys.readouterr().err
    log = json.loads(file.read_text(encoding="utf-8"))
    assert [one["id"] for one in log["samples"]] == ["sums:1@1", "sums:1@1", "sums:1@2"]
    assert log["eval"]["metadata"]["left_out"] == 3


@pytest.mark.skipif(importlib.util.find_spec("inspect_ai") is None, reason="needs the package inspect_ai")
@pytest.mark.parametrize("ending", ["json", "eval"])
def test_inspect_reads_its_log_back(run, tmp_path, ending):
    from inspect_ai.log import read_eval_log

    file = tmp_path / f"log.{ending}"
    assert main(["view", str(run), "--export", str(file)]) == 0
    log = read_eval_log(str(file))
    assert log.status == "success" and log.results.scores[0].metrics["mean"].value == 0.75
    assert log.samples[3].scores["reward"].value == 1.0


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="needs the package trackio")
def test_trackio_finds_the_traces_with_messages_numbers_and_spans(tmp_path, monkeypatch):
    for module in ("trackio.utils", "trackio.sqlite_storage"):
        monkeypatch.setattr(f"{module}.TRACKIO_DIR", tmp_path, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    demo = demo_runs("agentic")[0]
    assert main(["view", str(demo), "--trackio", "proj", "--steps", "50", "--episodes", "4"]) == 0
    with sqlite3.connect(next(tmp_path.rglob("proj*.db"))) as connection:
        connection.row_factory = sqlite3.Row
        rows = connection.execute("select * from traces order by trace_index").fetchall()
    assert [(one["run_name"], one["step"]) for one in rows] == [("dial", 50)] * 4
    messages, about, spans = (json.loads(rows[0][name]) for name in ("messages", "metadata", "spans"))
    assert [message["role"] for message in messages][:3] == ["user", "assistant", "user"]
    assert about["episode_status"] == "ok" and about["status"] == "ok" and about["task"] == "dial-train-415"
    assert {span["name"] for span in spans} >= {"episode", "generate", "environment"}
    assert {span["kind"] for span in spans if span["name"] == "generate"} == {"generation"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--export", "out.txt"], "the end of its name says the format"),
        (["--export", "out.json", "--steps", "7"], "there are 1, 2"),
        (["--export", "out.json", "--kind", "validation"], "no episodes of validations"),
        (["--export", "out.json", "--episodes", "0"], "give a number from 1"),
        (["OTHER", "--export", "out.eval"], "such a log holds one run, and 2 were given"),
    ],
)
def test_mistakes_are_told_before_a_file_is_written(run, tmp_path, monkeypatch, capsys, arguments, says):
    write_run(tmp_path / "OTHER", {1: group("t", 1.0)})
    monkeypatch.chdir(tmp_path)
    assert main(["view", str(run), *arguments]) == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.glob("out.*"))


def test_arguments_of_a_call_are_an_object_whatever_the_model_wrote():
    assert arguments_of('{"a": 1}') == ({"a": 1}, None)
    assert arguments_of("") == ({}, None)
    assert arguments_of("[1]") == ({"value": [1]}, "no JSON object")
    assert arguments_of("[" * 100_000)[1].startswith("no JSON")
    # Half a pair of surrogates is JSON, and no text that a file can have.
    assert arguments_of('{"\\ud800": ["\\udfff"]}') == ({"\\ud800": ["\\udfff"]}, None)
    assert arguments_of('{"a":' + "[" * 500 + "]" * 500 + "}")[1] == "no JSON: nested more than 100 deep"


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        (["a~2", "a", "a"], ["a~2", "a", "a~3"]),
        (["a\0b", "a\0c"], ["a_b", "a_c"]),
        (["..\\x", "../x"], [".._x", ".._x~2"]),
        (["é" * 40_000], ["é" * 100 + "~" + sha256(("é" * 40_000).encode()).hexdigest()[:16]]),
    ],
)
def test_every_sample_has_a_file_of_its_own_in_an_archive_whatever_its_task_is_called(tmp_path, tasks, expected):
    calls = [{"id": "c", "name": "n", "arguments": '{"a": "\\ud800", "b": ' + "[" * 300 + "]" * 300 + "}"}]
    turns = [turn(0, 0, "Q", "", tool_calls=calls)]
    run = write_run(tmp_path / "run", {1: [row(task, 0, 1.0, 0.0, turns=turns) for task in tasks]})
    assert main(["view", str(run), "--export", str(tmp_path / "log.eval")]) == 0
    with zipfile.ZipFile(tmp_path / "log.eval") as archive:
        files = [name for name in archive.namelist() if name.startswith("samples/")]
        assert files == [f"samples/{name}_epoch_1.json" for name in expected]
        assert [json.loads(archive.read(name))["id"] for name in files] == expected
