"""Spans in OpenTelemetry's protocol: as JSON lines into a file, or to a collector through OpenTelemetry's own package.

The file is OTLP in JSON (https://opentelemetry.io/docs/specs/otel/protocol/file-exporter): a line for each step, which
the collector's `otlpjsonfile` receiver reads. No package is needed for it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roll.tracking.spans import Span, SpanContext, Value

logger = logging.getLogger(__name__)
_ERROR = 2  # STATUS_CODE_ERROR of the protocol
_INTERNAL = 1  # SPAN_KIND_INTERNAL
_SAMPLED = 1
_SECONDS = 10


def as_otlp(spans: Sequence[Span], resource: Mapping[str, Value]) -> dict[str, Any]:
    """Return spans as a `TracesData` message in JSON; tracks become scopes, which are named by role and rank."""
    scopes: dict[str, list[dict[str, Any]]] = {}
    for span in spans:
        scopes.setdefault(span.track, []).append(_span(span))
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(resource)},
                "scopeSpans": [{"scope": {"name": track}, "spans": own} for track, own in sorted(scopes.items())],
            }
        ]
    }


def _span(span: Span) -> dict[str, Any]:
    record: dict[str, Any] = {
        "traceId": span.context.trace_id,
        "spanId": span.context.span_id,
        "name": span.name,
        "kind": _INTERNAL,
        # 64-bit integers are text in the JSON form of a protocol buffer.
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes(span.attributes),
    }
    if span.parent_id:
        record["parentSpanId"] = span.parent_id
    if span.links:
        record["links"] = [{"traceId": link.trace_id, "spanId": link.span_id} for link in span.links]
    if span.error:
        record["status"] = {"code": _ERROR, "message": span.error}
    return record


def _attributes(values: Mapping[str, Value]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Value) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": value}


class SpanWriter:
    """`spans.jsonl`. A resumed run appends: what was done stays on record."""

    def __init__(self, path: Path, resource: Mapping[str, Value], *, resumed: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._resource = resource
        self._file = open(path, "a" if resumed else "w", encoding="utf-8")  # noqa: SIM115 - held until `close`

    def export(self, spans: Sequence[Span]) -> None:
        """Append a line."""
        if spans:
            self._file.write(json.dumps(as_otlp(spans, self._resource), separators=(",", ":")) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class OtlpCollector:
    """Sends spans to `<endpoint>/v1/traces`. One that can't be reached is named once, and the run goes on."""

    def __init__(self, endpoint: str, resource: Mapping[str, Value]) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        # It logs a traceback for every failure of its own.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        address = endpoint.rstrip("/")
        self._address = address if address.endswith("/v1/traces") else f"{address}/v1/traces"
        self._exporter = OTLPSpanExporter(endpoint=self._address, timeout=_SECONDS)
        self._resource = resource
        self._warned = False

    def export(self, spans: Sequence[Span]) -> None:
        """Send them, and wait at most 10 s."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            result = self._exporter.export(as_sdk_spans(spans, self._resource)) if spans else SpanExportResult.SUCCESS
        except Exception as error:  # noqa: BLE001 - what shows a run must not end it
            self._warn(type(error).__name__)
        else:
            if result is not SpanExportResult.SUCCESS:
                self._warn("it didn't take them")

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("tracing.endpoint %s gets no spans (%s); spans.jsonl has them all", self._address, why)

    def close(self) -> None:
        """End its session."""
        self._exporter.shutdown()


def as_sdk_spans(spans: Sequence[Span], resource: Mapping[str, Value]) -> list[Any]:
    """Return spans as those of OpenTelemetry's SDK, which its exporters take."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import Link, SpanKind, Status, StatusCode

    of = Resource(dict(resource))
    return [
        ReadableSpan(
            name=span.name,
            context=_sdk_context(span.context),
            parent=_sdk_context(SpanContext(span.context.trace_id, span.parent_id)) if span.parent_id else None,
            resource=of,
            attributes=dict(span.attributes),
            links=[Link(_sdk_context(link)) for link in span.links],
            kind=SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=InstrumentationScope(span.track),
        )
        for span in spans
    ]


def _sdk_context(context: SpanContext) -> Any:
    from opentelemetry.trace import SpanContext as SdkContext
    from opentelemetry.trace import TraceFlags

    return SdkContext(
        trace_id=int(context.trace_id, 16),
        span_id=int(context.span_id, 16),
        is_remote=False,
        trace_flags=TraceFlags(_SAMPLED),
    )


def resource_of(run: str, version: str) -> dict[str, Value]:
    """Return what all spans of a run say about where they come from."""
    return {"service.name": "roll", "service.version": version, "roll.run": run, "process.pid": os.getpid()}
