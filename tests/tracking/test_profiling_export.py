"""Spans by themselves, and as OpenTelemetry takes them."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import logging
import threading

import pytest

from roll.tracking import spans
from roll.tracking.profiling import otlp
from roll.tracking.profiling.otlp import OtlpCollector, SpanWriter, as_otlp
from roll.tracking.spans import Span, SpanContext, SpanLog, recording_to, span, trace

CONTEXT = SpanContext("0123456789abcdef" * 2, "fedcba9876543210")
OTHER = SpanContext("f" * 32, "1" * 16)
ONE = Span(
    name="generate",
    context=CONTEXT,
    track="controller",
    start_ns=1_700_000_000_000_000_001,
    end_ns=1_700_000_000_500_000_000,
    parent_id="2" * 16,
    attributes={"turn": 3, "reward": 0.5, "ended": True, "episode": "a#1"},
    links=(OTHER,),
    error="ValueError",
)


def test_a_traceparent_is_read_and_written_and_anything_else_refused():
    text = f"00-{CONTEXT.trace_id}-{CONTEXT.span_id}-01"
    assert CONTEXT.traceparent == text
    assert SpanContext.parse(text) == CONTEXT
    with pytest.raises(ValueError, match="expected a traceparent"):
        SpanContext.parse("01-x")


def test_spans_nest_in_one_trace_and_carry_attributes_and_the_error_that_ended_them():
    log = SpanLog("controller")
    with recording_to(log), span("step", step=3) as step:
        with contextlib.suppress(KeyError), span("inner") as inner:
            spans.annotate(tokens=5)
            raise KeyError("secret text")
        assert spans.current_context() == step.context
    found, dropped = log.take()
    assert [s.name for s in found] == ["inner", "step"]
    assert (inner.parent_id, inner.context.trace_id) == (step.context.span_id, step.context.trace_id)
    assert (inner.attributes, inner.error) == ({"tokens": 5}, "KeyError")
    assert (step.parent_id, step.attributes) == ("", {"step": 3})
    assert dropped == 0
    assert log.take() == ([], 0)


def test_nothing_is_made_while_nobody_records():
    first, second = span("a", x=1), trace("b")
    assert first is second  # one object for all
    with first as nothing:
        assert nothing is None
        assert spans.current_context() is None
    assert not spans.is_recording()


def test_episodes_that_overlap_on_one_thread_have_traces_of_their_own_and_link_to_the_step():
    log = SpanLog("controller")

    async def episode(name, kept=True):
        with trace("episode", kept=kept, name_=name):
            await asyncio.sleep(0)
            with span("generate"):
                await asyncio.sleep(0)

    async def play():
        await asyncio.gather(episode("a"), episode("b"), episode("left out", kept=False))

    with recording_to(log), span("step") as step:
        asyncio.run(play())
    found, _ = log.take()
    by_trace = {}
    for each in found:
        by_trace.setdefault(each.context.trace_id, []).append(each.name)
    assert sorted(by_trace.values()) == [["generate", "episode"], ["generate", "episode"], ["step"]]
    first = next(s for s in found if s.name == "episode")
    assert first.links == (step.context,)
    assert first.overlaps


def test_a_task_that_outlives_the_span_it_began_in_is_inside_the_step_under_way():
    log = SpanLog("controller")

    async def run():
        event = asyncio.Event()

        async def poll():
            await event.wait()
            return spans.current_context()

        with span("generate"):
            task = asyncio.create_task(poll())
            await asyncio.sleep(0)
        with span("step 2") as step:
            log.base = step
            event.set()
            assert await task == step.context

    with recording_to(log):
        asyncio.run(run())


def test_a_log_counts_the_spans_beyond_its_limit():
    log = SpanLog("x", limit=2)
    for _ in range(5):
        log.add(ONE)
    assert log.take() == ([ONE, ONE], 3)


def test_the_json_form_of_a_span_is_that_of_the_protocol(tmp_path):
    # https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding: ids in hex, 64-bit integers as text
    assert as_otlp([ONE], {"service.name": "roll"}) == {
        "resourceSpans": [
            {
                "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "roll"}}]},
                "scopeSpans": [
                    {
                        "scope": {"name": "controller"},
                        "spans": [
                            {
                                "traceId": "0123456789abcdef0123456789abcdef",
                                "spanId": "fedcba9876543210",
                                "parentSpanId": "2222222222222222",
                                "name": "generate",
                                "kind": 1,
                                "startTimeUnixNano": "1700000000000000001",
                                "endTimeUnixNano": "1700000000500000000",
                                "attributes": [
                                    {"key": "turn", "value": {"intValue": "3"}},
                                    {"key": "reward", "value": {"doubleValue": 0.5}},
                                    {"key": "ended", "value": {"boolValue": True}},
                                    {"key": "episode", "value": {"stringValue": "a#1"}},
                                ],
                                "links": [{"traceId": "f" * 32, "spanId": "1" * 16}],
                                "status": {"code": 2, "message": "ValueError"},
                            }
                        ],
                    }
                ],
            }
        ]
    }
    for resumed in (False, True, True):
        file = SpanWriter(tmp_path / "logs" / "spans.jsonl", {}, resumed=resumed)
        file.export([ONE])
        file.export([])
        file.close()
    lines = (tmp_path / "logs" / "spans.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [as_otlp([ONE], {})] * 3


def test_a_collector_gets_what_the_file_has():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        collector = OtlpCollector(f"http://127.0.0.1:{server.server_port}/", {"roll.run": "toy"})
        collector.export([])
        collector.export([ONE])
        collector.close()
    finally:
        server.shutdown()
        server.server_close()
    ((path, message),) = got
    (resource,) = message.resource_spans
    (scope,) = resource.scope_spans
    (sent,) = scope.spans
    assert (path, scope.scope.name) == ("/v1/traces", "controller")
    assert {a.key: a.value.string_value for a in resource.resource.attributes}["roll.run"] == "toy"
    assert (sent.trace_id.hex(), sent.span_id.hex(), sent.parent_span_id.hex()) == (
        CONTEXT.trace_id,
        CONTEXT.span_id,
        "2" * 16,
    )
    assert (sent.name, sent.start_time_unix_nano, sent.end_time_unix_nano) == ("generate", ONE.start_ns, ONE.end_ns)
    assert {a.key for a in sent.attributes} == {"turn", "reward", "ended", "episode"}
    assert [(link.trace_id.hex(), link.span_id.hex()) for link in sent.links] == [(OTHER.trace_id, OTHER.span_id)]
    assert (sent.status.code, sent.status.message) == (2, "ValueError")


def test_a_collector_that_cant_be_reached_is_named_once(caplog, monkeypatch):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setattr(otlp, "_SECONDS", 0.2)
    collector = OtlpCollector("http://127.0.0.1:9", {})  # the port of `discard`, where nobody listens
    with caplog.at_level(logging.WARNING, logger="roll"):
        collector.export([ONE])
        collector.export([ONE])
    collector.close()
    assert [r.message for r in caplog.records if "gets no spans" in r.message] == [
        "tracing.endpoint http://127.0.0.1:9/v1/traces gets no spans (it didn't take them); spans.jsonl has them all"
    ]
