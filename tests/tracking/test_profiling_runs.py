"""The toy, profiled and traced: files, names, nesting, and that nothing else changes."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
import torch
from safetensors.torch import load_file
from toy import run_toy, write_toy
from toy_env import SHORT, without_template, write_toy_env

from roll.cli.__main__ import main
from roll.tracking import spans
from roll.tracking.names import is_timing
from roll.tracking.profiling.chrome import read_trace

FEW = (
    "max_steps=3",
    "rollout_batch_size=2",
    "num_return_sequences_in_group=2",
    "actor_train.training_args.per_device_train_batch_size=4",
    "actor_train.training_args.gradient_accumulation_steps=1",
    "reference.infer_batch_size=8",
    "use_kl_loss=true",
    "kl_loss_coef=0.1",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_model):
    """The same run without, with profiles of step 2, and with spans of all steps."""
    folder = tmp_path_factory.mktemp("profiled")
    made = {
        "plain": (),
        "profiled": ("profile_steps=2", "profiler.record_shapes=true"),
        "traced": ("tracing.enabled=true",),
    }
    rows = {name: run_toy(write_toy(folder / name, tiny_model), *FEW, *more) for name, more in made.items()}
    return folder, rows


def profiles(folder):
    return folder / "profiled" / "output" / "logs" / "profiler"


def summary_of(folder):
    return json.loads((profiles(folder) / "step-000002.summary.json").read_text())


def test_metrics_and_weights_are_those_of_a_run_without(runs):
    folder, rows = runs
    compared = {n: [{k: v for k, v in r.items() if not is_timing(k)} for r in own] for n, own in rows.items()}
    assert compared["profiled"] == compared["plain"]
    assert compared["traced"] == compared["plain"]
    weights = {name: load_file(folder / name / "output" / "hf_model" / "model.safetensors") for name in rows}
    for name, plain in weights["plain"].items():
        assert torch.equal(plain, weights["profiled"][name])
        assert torch.equal(plain, weights["traced"][name])


def test_nothing_is_written_or_left_on_by_default(runs):
    folder, _ = runs
    assert not (folder / "plain" / "output" / "logs" / "profiler").exists()
    assert not (folder / "plain" / "output" / "logs" / "spans.jsonl").exists()
    assert not spans.is_recording()


def test_a_profiled_step_has_a_trace_for_the_controller_and_each_rank(runs):
    folder, _ = runs
    files = sorted(path.name for path in profiles(folder).iterdir())
    assert files == [
        "step-000002.actor_infer-0.json.gz",
        "step-000002.actor_train-0.json.gz",
        "step-000002.controller.json.gz",
        "step-000002.reference-0.json.gz",
        "step-000002.summary.json",
    ]


def slices_nest(events):
    """Whether slices of each thread are inside one another or apart, to the nanosecond that files keep."""
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], -event["dur"], event["ts"] + event["dur"]))
    for own in threads.values():
        open_: list[float] = []
        for start, _, end in sorted(own):
            while open_ and open_[-1] <= start + 0.002:
                open_.pop()
            if open_ and end > open_[-1] + 0.002:
                return False
            open_.append(end)
    return True


def test_the_controllers_trace_shows_phases_calls_episodes_and_memory(runs):
    folder, _ = runs
    found = read_trace(profiles(folder) / "step-000002.controller.json.gz")
    events = found["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["actor_infer rank 0", "actor_train rank 0", "controller", "reference rank 0"]
    by_process = defaultdict(set)
    for event in events:
        by_process[names[event["pid"]]].add(event["name"])
    assert {"step 2", "generate", "reference", "update", "train_actor", "sync_weights"} <= by_process["controller"]
    assert {"submit", "poll", "update_weights"} <= by_process["actor_infer rank 0"]
    assert {"train_step", "send_weights", "resident memory"} <= by_process["actor_train rank 0"]
    assert "forward" in by_process["reference rank 0"]
    begun = [e for e in events if e["ph"] == "b" and e["name"] == "episode"]
    assert len(begun) == 4
    assert len({e["id"] for e in begun}) == 4
    assert sum(e["ph"] == "e" for e in events) == sum(e["ph"] == "b" for e in events)
    assert slices_nest(events)


def test_a_ranks_trace_shows_its_operators_under_its_name(runs):
    folder, _ = runs
    found = read_trace(profiles(folder) / "step-000002.actor_train-0.json.gz")
    events = found["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"actor_train rank 0"}
    operators = [e for e in events if e["ph"] == "X"]
    assert {"aten::mm", "Optimizer.step#AdamW.step"} <= {e["name"] for e in operators}
    assert any("Input Dims" in e.get("args", {}) for e in operators)
    assert slices_nest(events)
    assert found["otherData"]["step"] == 2
    # Within the step, which began at 0.
    summary = summary_of(folder)
    assert min(e["ts"] for e in operators) > 0
    assert max(e["ts"] + e["dur"] for e in operators) < summary["seconds"] * 1e6


def test_roll_profile_prints_where_each_second_went(runs, capsys):
    folder, _ = runs
    assert main(["profile", str(folder / "profiled" / "output"), "--top", "3"]) == 0
    shown = capsys.readouterr().out
    expected = ("3 steps,", "outside any phase", "step 2, profiled:", "train_actor", "actor_train rank 0 on", "aten::")
    for words in expected:
        assert words in shown
    summary = summary_of(folder)
    assert sum(row["own_seconds"] for row in summary["phases"]) == pytest.approx(summary["seconds"], abs=1e-4)


def test_roll_profile_says_what_is_missing(runs, capsys, tmp_path):
    folder, _ = runs
    assert main(["profile", str(folder / "plain" / "output")]) == 0
    assert "no step was profiled; profile_steps=[2]" in capsys.readouterr().out
    assert main(["profile", str(folder / "profiled" / "output"), "--step", "1"]) == 2
    assert "no profile of step 1; profiled steps: 2" in capsys.readouterr().err
    assert main(["profile", str(tmp_path / "nowhere")]) == 2


# --- spans ------------------------------------------------------------------------------------------------------------


def read_spans(folder):
    """All spans of a run, plain: attributes as a dict."""
    found = []
    for line in (folder / "output" / "logs" / "spans.jsonl").read_text().splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    values = {a["key"]: next(iter(a["value"].values())) for a in span["attributes"]}
                    found.append({**span, "attributes": values, "track": scope["scope"]["name"]})
    return found


def test_one_trace_tells_an_episode_from_its_start_to_the_update_that_trained_on_it(runs):
    folder, _ = runs
    found = read_spans(folder / "traced")
    episodes = [s for s in found if s["name"] == "episode" and s["attributes"]["purpose"] == "train"]
    assert len(episodes) == 3 * 4  # steps x responses
    updates = {s["spanId"]: s for s in found if s["name"] == "update" and "episodes" in s["attributes"]}
    for episode in episodes:
        inside = [s for s in found if s["traceId"] == episode["traceId"] and s is not episode]
        assert all(s["parentSpanId"] == episode["spanId"] for s in inside)
        by_name = {s["name"]: s for s in sorted(inside, key=lambda s: int(s["startTimeUnixNano"]))}
        assert list(by_name) == ["reset", "generate", "reward", "update"]
        answer = by_name["generate"]["attributes"]
        step = int(episode["attributes"]["step"])
        assert (int(answer["engine"]), int(answer["tokens"])) == (0, 2)
        assert int(answer["weight_version_first"]) == int(answer["weight_version_last"]) == step - 1
        assert "reward" in by_name["reward"]["attributes"]
        (link,) = by_name["update"]["links"]
        update = updates[link["spanId"]]
        assert int(update["attributes"]["step"]) == step
        assert {"traceId": episode["traceId"], "spanId": episode["spanId"]} in update["links"]


def test_calls_of_workers_are_inside_the_phase_that_made_them(runs):
    folder, _ = runs
    found = read_spans(folder / "traced")
    phases = {s["spanId"]: s for s in found}
    calls = [s for s in found if s["track"] == "actor_train-0"]
    assert {s["name"] for s in calls} >= {"train_step", "send_weights"}
    for call in calls:
        if call["name"] == "train_step":
            assert phases[call["parentSpanId"]]["name"] == "train_actor"
            assert phases[call["parentSpanId"]]["traceId"] == call["traceId"]


def test_no_prompt_response_or_setting_is_in_the_spans(runs):
    folder, _ = runs
    text = (folder / "traced" / "output" / "logs" / "spans.jsonl").read_text()
    prompts = [json.loads(line)["prompt"] for line in (folder / "traced" / "case.jsonl").read_text().splitlines()]
    assert not any(prompt in text for prompt in prompts)
    assert str(folder) not in text


def test_the_file_is_otlp_that_opentelemetrys_own_messages_take(runs):
    trace_pb2 = pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2")
    from google.protobuf import json_format

    folder, _ = runs
    lines = (folder / "traced" / "output" / "logs" / "spans.jsonl").read_text().splitlines()
    for line in lines:
        message = json_format.Parse(line, trace_pb2.TracesData())
        spans_ = [s for r in message.resource_spans for scope in r.scope_spans for s in scope.spans]
        assert all(s.start_time_unix_nano <= s.end_time_unix_nano for s in spans_)
    assert len(lines) >= 3  # a line for each step


def test_a_share_of_the_episodes_is_the_same_in_every_run(tmp_path, tiny_model):
    share = ("tracing.enabled=true", "tracing.episode_share=0.5", "max_steps=1", "rollout_batch_size=8")
    found = []
    for name in ("a", "b"):
        run_toy(write_toy(tmp_path / name, tiny_model), *FEW, *share)
        spans_ = read_spans(tmp_path / name)
        found.append({s["attributes"]["episode"] for s in spans_ if s["name"] == "episode"})
        kept = {s["traceId"] for s in spans_ if s["name"] == "episode"}
        assert {s["traceId"] for s in spans_ if "request" in s["attributes"]} == kept
    assert found[0] == found[1]
    assert 0 < len(found[0]) < 16


def test_ranks_under_ray_write_their_own_traces_and_the_callers_trace_goes_along(tmp_path, tiny_model):
    folder = write_toy(tmp_path / "ray", tiny_model)
    run_toy(
        folder,
        *FEW,
        "executor=ray",
        "num_gpus_per_node=2",
        "actor_train.device_mapping='0-1'",
        "actor_train.training_args.per_device_train_batch_size=2",
        "profile_steps=2",
        "profiler.roles=actor_train",
        "profiler.ranks=1",
        "profiler.ray_timeline=true",
        "tracing.enabled=true",
    )
    place = folder / "output" / "logs" / "profiler"
    assert sorted(path.name for path in place.iterdir()) == [
        "ray_timeline.json",
        "step-000002.actor_train-1.json.gz",
        "step-000002.controller.json.gz",
        "step-000002.summary.json",
    ]
    assert any(event["name"] == "invoke" for event in json.loads((place / "ray_timeline.json").read_text()))
    found = read_trace(place / "step-000002.controller.json.gz")
    assert len(set(found["otherData"]["processes"].values())) == 4  # two ranks of the trainer, engine, reference
    found = read_spans(folder)
    phases = {s["spanId"]: s["name"] for s in found}
    for rank in (0, 1):
        calls = [s for s in found if s["track"] == f"actor_train-{rank}" and s["name"] == "train_step"]
        assert [phases[s["parentSpanId"]] for s in calls] == ["train_actor"] * 3


def test_an_episode_of_several_turns_has_a_span_for_each_response_and_step_of_its_environment(tmp_path, tiny_model):
    folder = write_toy_env(tmp_path / "letters", without_template(tiny_model, tmp_path / "model"))
    run_toy(folder, "max_steps=1", "tracing.enabled=true", *SHORT)
    found = read_spans(folder)
    (episode, *_) = [s for s in found if s["name"] == "episode" and int(s["attributes"]["turns"]) == 2]
    inside = sorted((s for s in found if s["traceId"] == episode["traceId"]), key=lambda s: int(s["startTimeUnixNano"]))
    names = [s["name"] for s in inside if s["name"] != "wait for a slot"]
    assert names == ["episode", "reset", "generate", "environment", "generate", "environment", "update"]
    assert [int(s["attributes"]["turn"]) for s in inside if s["name"] in ("generate", "environment")] == [0, 0, 1, 1]
