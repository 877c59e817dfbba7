"""OpenTelemetry traces: one span per request, made when the request has ended.

A span has ids, counts and times; it has no prompts, outputs or keys. The library is imported only
if traces are enabled.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from modelmill import __version__
from modelmill.core.errors import MissingDependency, UsageError
from modelmill.core.packages import install_command
from modelmill.serve.request_handle import HttpRequestHandle
from modelmill.serve.request_target import sent_method

TRACER_NAME = "modelmill.serve"
NANOSECONDS_PER_SECOND = 1_000_000_000
"""Spans are timed in nanoseconds."""


@dataclass(frozen=True)
class FinishedRequest:
    """A request that has ended.

    Attributes:
        scope: of ASGI, after routing.
        headers: of the request, names in lower case.
        request_id: as logged.
        status: HTTP status; None: the connection was lost before a response.
        started_at: by time.perf_counter.
    """

    scope: Mapping[str, Any]
    headers: Mapping[bytes, bytes]
    request_id: str
    status: int | None
    started_at: float


class RequestTracer:
    """Makes spans and passes them to an exporter."""

    def __init__(self, provider: Any) -> None:
        """Make spans with a provider.

        Args:
            provider: a TracerProvider, which ``close`` shuts down.
        """
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer(TRACER_NAME, __version__)
        self._propagator = TraceContextTextMapPropagator()

    @staticmethod
    def for_endpoint(endpoint: str) -> RequestTracer:
        """Send spans to a collector over OTLP/HTTP; a URL without a path gets /v1/traces.

        Raises:
            UsageError: the endpoint is not a URL.
            MissingDependency: the OpenTelemetry libraries are not installed.
        """
        url = collector_url(endpoint)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError as missing:
            raise MissingDependency(
                f"--otlp-endpoint needs {missing.name}; install it with: {install_command('otel')}"
            ) from None
        resource = Resource.create({"service.name": "modelmill", "service.version": __version__})
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=5)))
        return RequestTracer(provider)

    def record_span(self, request: FinishedRequest) -> str:
        """Make the span of a request; return its trace id, 32 hexadecimal digits."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        scope = request.scope
        now = time.time_ns()
        clock = time.perf_counter()

        def to_nanoseconds(moment: float) -> int:
            return now - int((clock - moment) * NANOSECONDS_PER_SECOND)

        route, method = getattr(scope.get("route"), "path", None), sent_method(scope)
        # only known routes: an unknown path may contain anything
        name = f"{method} {route}" if route else method
        span = self._tracer.start_span(
            name,
            context=self._parent_context(request.headers),
            kind=SpanKind.SERVER,
            start_time=to_nanoseconds(request.started_at),
        )
        span.set_attributes(
            {"http.request.method": method, "modelmill.request_id": request.request_id}
        )
        if route:
            span.set_attribute("http.route", route)
        if request.status is not None:
            span.set_attribute("http.response.status_code", request.status)
        if request.status is None or request.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        handle = scope.get("modelmill.request_handle")
        if isinstance(handle, HttpRequestHandle):
            span.set_attributes(_span_attributes(handle, scope.get("modelmill.engine")))
            for event, moment in _span_events(handle):
                span.add_event(event, timestamp=to_nanoseconds(moment))
        span.end(end_time=now)
        return format(span.get_span_context().trace_id, "032x")

    def close(self) -> None:
        """Export the remaining spans."""
        self._provider.shutdown()

    def _parent_context(self, headers: Mapping[bytes, bytes]) -> Any:
        """Context of the client's traceparent and tracestate headers (W3C)."""
        names = ("traceparent", "tracestate")
        carrier = {
            name: headers[name.encode()].decode("latin-1")
            for name in names
            if name.encode() in headers
        }
        return self._propagator.extract(carrier)


def collector_url(endpoint: str) -> str:
    """Return the URL that spans are sent to.

    Raises:
        UsageError: the endpoint is not a URL.
    """
    try:
        parts = urlsplit(endpoint)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or parts.scheme not in ("http", "https"):
        raise UsageError(f"--otlp-endpoint {endpoint[:100]!r} is not a URL; give http://HOST:4318")
    return endpoint if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1/traces"


def _span_attributes(handle: HttpRequestHandle, engine: str | None) -> dict[str, Any]:
    """Span attributes, named by OpenTelemetry's conventions for generative AI where they exist."""
    counts = handle.usage_and_ttft()
    request = handle.request_states[0].request
    params, embeds = request.params, request.pooling is not None
    outputs = [output for each in handle.request_states for output in each.output.outputs]
    reasons = {output.finish_reason or handle.aborted_metric_label for output in outputs}
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "embeddings" if embeds else "text_completion",
        "gen_ai.request.model": engine,
        "gen_ai.request.max_tokens": None if embeds else params.max_tokens,
        "gen_ai.request.temperature": None if embeds else params.temperature,
        "gen_ai.request.top_p": None if embeds else params.top_p,
        "gen_ai.request.choice.count": None if embeds else handle.num_sequences,
        "gen_ai.response.finish_reasons": None if embeds else sorted(reasons),
        "gen_ai.usage.input_tokens": counts["prompt_tokens"],
        "gen_ai.usage.output_tokens": counts["completion_tokens"],
        "modelmill.cached_tokens": counts["cached_tokens"],
        "modelmill.queue_seconds": handle.queue_seconds,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _span_events(handle: HttpRequestHandle) -> list[tuple[str, float]]:
    """Times of queueing, prefill and decode of the first prompt; by time.perf_counter."""
    events = [("queue", handle.created_at)]
    if handle.queue_seconds is not None:
        events.append(("prefill", handle.created_at + handle.queue_seconds))
    first_tokens = [
        (each.start_time, each.output.first_token_seconds) for each in handle.request_states
    ]
    first = [started + seconds for started, seconds in first_tokens if seconds is not None]
    if first:
        # queue_seconds was measured by the worker process, whose clock may differ a little
        events.append(("decode", max(events[-1][1], min(first))))
    return events
