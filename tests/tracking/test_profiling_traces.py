"""Traces and numbers of a profiled step, from spans and operators whose times are chosen by hand."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from roll.cli.profile import timings
from roll.tracking.profiling.chrome import label, read_trace, span_events, write_trace
from roll.tracking.profiling.operators import OperatorTrace, longest, operator_times
from roll.tracking.profiling.profile_plan import RankPlan, StepPlan, outgoing, profiling_step
from roll.tracking.profiling.profile_summary import calls_of, phases_of
from roll.tracking.spans import Span, SpanContext

TRACE = "ab" * 16


def at(name, start, end, *, parent="", track="controller", span_id="", **more):
    """A span from `start` to `end` seconds after 1970."""
    context = SpanContext(TRACE, span_id or f"{abs(hash(name)) % 16**16:016x}")
    times = {"start_ns": int(start * 1e9), "end_ns": int(end * 1e9)}
    return Span(name=name, context=context, track=track, parent_id=parent, **times, **more)


def operator(name, start, end, *, thread=1, cat="cpu_op"):
    return {"name": name, "cat": cat, "pid": 7, "tid": thread, "ts": start, "dur": end - start, "args": {}}


def test_own_time_of_operators_is_without_those_they_call_and_recursion_counts_once_in_the_total():
    # linear 0..10 calls addmm 2..6, which calls copy 3..4, and copy 7..9; on thread 2 a copy 0..5;
    # sum 20..30 calls itself from 22 to 26.
    events = [
        operator("copy", 3, 4), operator("linear", 0, 10), operator("addmm", 2, 6), operator("copy", 7, 9),
        operator("copy", 0, 5, thread=2), operator("sum", 20, 30), operator("sum", 22, 26),
        operator("frame", 0, 40, cat="python_function"),
    ]  # fmt: skip
    found = {t.name: (t.calls, t.own, t.total) for t in operator_times(events)}
    assert found == {
        "linear": (1, 4.0, 10.0),  # 10 - 4 - 2
        "addmm": (1, 3.0, 4.0),  # 4 - 1
        "copy": (3, 8.0, 8.0),  # 1 + 2 + 5
        "sum": (2, 10.0, 10.0),  # (10 - 4) + 4, and the inner one isn't added to the total
    }
    assert [t.name for t in operator_times(events)] == ["sum", "copy", "linear", "addmm"]


def test_a_trace_over_its_limit_keeps_the_longest_events_which_still_nest():
    events = [operator("a", 0, 10), operator("b", 1, 2), operator("c", 3, 9), operator("d", 4, 5.5)]
    assert [e["name"] for e in longest(events, 2)] == ["a", "c"]
    assert longest(events, 4) is events


def test_own_seconds_of_the_phases_add_up_to_the_step():
    root = at("step 3", 0, 10, span_id="1" * 16)
    step = at("step", 0.5, 9.5, parent="1" * 16, span_id="2" * 16)
    inside = [
        at("generate", 1, 4, parent="2" * 16),
        at("update", 4, 9, parent="2" * 16, span_id="3" * 16),
        at("train_actor", 4.5, 6.5, parent="3" * 16, span_id="4" * 16),
        at("train_actor", 6.5, 8.5, parent="3" * 16, span_id="5" * 16),
        at("episode", 1, 3, overlaps=True),
        at("train_step", 5, 6, track="actor_train-0", parent="4" * 16),
    ]
    rows = phases_of(root, [*inside, step])
    assert [(r["depth"], r["name"], r["seconds"], r["own_seconds"], r["count"]) for r in rows] == [
        (0, "outside any phase", 10.0, 1.0, 1),
        (1, "step", 9.0, 1.0, 1),  # 9 - 3 - 5
        (2, "generate", 3.0, 3.0, 1),
        (2, "update", 5.0, 1.0, 1),  # 5 - 2 - 2
        (3, "train_actor", 4.0, 4.0, 2),
    ]
    assert sum(r["own_seconds"] for r in rows) == 10.0


def test_calls_of_a_rank_are_added_up_by_method():
    whose = {"role": "actor_train", "rank": 1}
    spans = [
        at("forward", 0, 1, track="actor_train-1", attributes={**whose, "rss_after_mib": 10.0}),
        at("forward", 2, 4, track="actor_train-1", attributes={**whose, "rss_after_mib": 30.0}),
        at("save", 4, 9, track="actor_train-1", attributes=whose),
        at("inner", 4, 8, track="actor_train-1"),
        at("forward", 0, 9, track="actor_train-0", attributes={"role": "actor_train", "rank": 0}),
    ]
    assert calls_of("actor_train-1", spans) == [
        {"name": "save", "count": 1, "seconds": 5.0, "longest": 5.0, "rss_mib": None},
        {"name": "forward", "count": 2, "seconds": 3.0, "longest": 2.0, "rss_mib": 30.0},
    ]


def test_spans_become_a_process_for_each_rank_and_nested_or_overlapping_slices(tmp_path):
    spans = [
        at("poll", 1, 2, track="actor_infer-0", thread=77, attributes={"rss_before_mib": 5.0, "rss_after_mib": 6.0}),
        at("step", 0, 4, thread=5),
        at("episode", 0.5, 3, overlaps=True, attributes={"member": 2}),
    ]
    write_trace(tmp_path / "t.json.gz", span_events(spans, 0), {"step": 1})
    found = read_trace(tmp_path / "t.json.gz")
    assert found["otherData"] == {"step": 1}
    events = found["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "controller", 2: "actor_infer rank 0"}
    (step,) = [e for e in events if e["name"] == "step"]
    assert (step["ph"], step["pid"], step["tid"], step["ts"], step["dur"]) == ("X", 1, 1, 0.0, 4e6)
    begin, end = [e for e in events if e["name"] == "episode"]
    assert (begin["ph"], begin["ts"], begin["args"]) == ("b", 0.5e6, {"member": 2})
    assert (end["ph"], end["ts"]) == ("e", 3e6)
    assert begin["id"] == end["id"] == TRACE[:16]
    assert [(e["ts"], e["args"]["MiB"]) for e in events if e["ph"] == "C"] == [(1e6, 5.0), (2e6, 6.0)]


def test_a_role_may_have_dashes_and_the_controller_has_no_rank():
    assert [label(t) for t in ("controller", "reward_models.a-b-12")] == ["controller", "reward_models.a-b rank 12"]


def test_a_broken_trace_is_an_error_with_its_name(tmp_path):
    file = tmp_path / "t.json.gz"
    write_trace(file, [{"ph": "M"}] * 100, {})
    file.write_bytes(file.read_bytes()[:30])
    with pytest.raises(ValueError, match="t.json.gz can't be read as a trace"):
        read_trace(file)


def test_the_plan_of_a_step_chooses_roles_and_ranks():
    rank = RankPlan(step=3, folder="/x", torch=True)
    plan = StepPlan(rank, roles=("actor_train",), ranks=(0, 2))
    assert plan.of("actor_train", 2) is rank
    assert plan.of("actor_train", 1) is None
    assert plan.of("critic", 0) is None
    assert StepPlan(rank).of("critic", 9) is rank
    assert outgoing("actor_train", 0) is None
    with profiling_step(plan):
        assert outgoing("actor_train", 0).plan is rank
        assert outgoing("actor_train", 1).plan is None
    assert outgoing("actor_train", 0) is None


def test_torchs_operators_of_one_call_are_in_the_trace_with_shapes(tmp_path):
    import torch

    trace = OperatorTrace(RankPlan(step=1, folder=str(tmp_path), torch=True, record_shapes=True), "critic-0")
    profiler = trace.start()
    busy = OperatorTrace(RankPlan(step=1, folder=""), "actor-0")
    assert busy.start() is None  # a process has one profiler
    torch.ones(3, 5) @ torch.ones(5, 2)
    trace.finish(profiler)
    totals = trace.write(tmp_path / "t.json.gz", 0)
    assert busy.unwatched == 1
    assert {row["name"]: row["calls"] for row in totals["operators"]}["aten::mm"] == 1
    events = [e for e in read_trace(tmp_path / "t.json.gz")["traceEvents"] if e["name"] == "aten::mm"]
    assert [e["args"]["Input Dims"] for e in events] == [[[3, 5], [5, 2]]]


def test_the_modules_that_every_call_goes_through_load_no_torch():
    code = "import sys, roll.tracking.spans\nfrom roll.tracking.profiling import profile_plan, recorder\n"
    code += "print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(shown.strip().lower()) is False


def test_what_lies_between_steps_has_no_share_of_them():
    row = {"time/step": 4.0, "time/step/self": 1.0, "time/generate": 3.0, "time/validate": 2.0}
    lines = [line.split() for line in timings([row, row]).splitlines()]
    assert ["generate", "3.000", "6.00", "75.0%", "2"] in lines
    assert ["validate", "2.000", "4.00", "between", "2"] in lines
