"""OpenTelemetry traces: a span for each request, made when it has ended, so that it costs nothing
while it runs.

Ids, counts and times are in a span; prompts, answers and keys are not. The library is imported when
traces are asked for, and only then.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from modelmill import __version__
from modelmill.core.errors import MissingDependency, UsageError
from modelmill.serve.request_handle import RequestHandle

TRACER_NAME = "modelmill.serve"
NANOSECONDS_PER_SECOND = 1_000_000_000
"""In nanoseconds, which are a span's unit."""


@dataclass(frozen=True)
class FinishedRequest:
    """A request that has ended.

    scope: of ASGI, after routing. started_at: by perf_counter. status: None: cut off.
    """

    scope: Mapping[str, Any]
    headers: Mapping[bytes, bytes]
    request_id: str
    status: int | None
    started_at: float


class Traces:
    """Makes spans and hands them to an exporter."""

    def __init__(self, provider: Any) -> None:
        """provider: a TracerProvider, which is shut down by ``close``."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer(TRACER_NAME, __version__)
        self._propagator = TraceContextTextMapPropagator()

    @staticmethod
    def export_to(endpoint: str) -> Traces:
        """Spans go to a collector over OTLP and HTTP; a URL without a path means its /v1/traces.

        Raises UsageError for what is no URL, MissingDependency without the libraries.
        """
        where = collector_url(endpoint)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError as missing:
            raise MissingDependency(
                f"--otlp-endpoint needs {missing.name}; install it with: pip install "
                "'modelmill[otel]'"
            ) from None
        resource = Resource.create({"service.name": "modelmill", "service.version": __version__})
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=where, timeout=5)))
        return Traces(provider)

    def record_span(self, request: FinishedRequest) -> str:
        """Make the span of a request; returns its trace's id, 32 hexadecimal digits."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        scope, now, clock = request.scope, time.time_ns(), time.perf_counter()

        def at(moment: float) -> int:
            return now - int((clock - moment) * NANOSECONDS_PER_SECOND)

        route = getattr(scope.get("route"), "path", None)
        # a path that is none of ours may hold anything
        name = f"{scope['method']} {route}" if route else str(scope["method"])
        span = self._tracer.start_span(
            name,
            context=self._parent_context(request.headers),
            kind=SpanKind.SERVER,
            start_time=at(request.started_at),
        )
        span.set_attributes(
            {"http.request.method": scope["method"], "modelmill.request_id": request.request_id}
        )
        if route:
            span.set_attribute("http.route", route)
        if request.status is not None:
            span.set_attribute("http.response.status_code", request.status)
        if request.status is None or request.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        ticket = scope.get("modelmill.request_handle")
        if isinstance(ticket, RequestHandle):
            span.set_attributes(_span_attributes(ticket, scope.get("modelmill.engine")))
            for event, moment in _span_events(ticket):
                span.add_event(event, timestamp=at(moment))
        span.end(end_time=now)
        return format(span.get_span_context().trace_id, "032x")

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def _parent_context(self, headers: Mapping[bytes, bytes]) -> Any:
        """What the caller's traceparent and tracestate (W3C) say."""
        names = ("traceparent", "tracestate")
        carrier = {
            name: headers[name.encode()].decode("latin-1")
            for name in names
            if name.encode() in headers
        }
        return self._propagator.extract(carrier)


def collector_url(endpoint: str) -> str:
    """The URL that spans are sent to. Raises UsageError for what is no URL."""
    try:
        parts = urlsplit(endpoint)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or parts.scheme not in ("http", "https"):
        raise UsageError(f"--otlp-endpoint {endpoint[:100]!r} is no URL; give http://HOST:4318")
    return endpoint if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1/traces"


def _span_attributes(handle: RequestHandle, engine: str | None) -> dict[str, Any]:
    """By OpenTelemetry's conventions for generative AI, where they have a name."""
    counts = handle.token_counts()
    request = handle.request_states[0].request
    params, embeds = request.params, request.pooling is not None
    outputs = [output for each in handle.request_states for output in each.output.outputs]
    reasons = {output.finish_reason or handle.abort_reason for output in outputs}
    found: dict[str, Any] = {
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
    return {name: value for name, value in found.items() if value is not None}


def _span_events(handle: RequestHandle) -> list[tuple[str, float]]:
    """When the first of its prompts was queued, left the queue, and had its first token; by
    time.perf_counter.
    """
    found = [("queue", handle.created_at)]
    if handle.queue_seconds is not None:
        found.append(("prefill", handle.created_at + handle.queue_seconds))
    answers = [(each.start_time, each.output.first_token_seconds) for each in handle.request_states]
    first = [started + seconds for started, seconds in answers if seconds is not None]
    if first:
        # what queued was counted by the engine's process: its clock may run a little otherwise
        found.append(("decode", max(found[-1][1], min(first))))
    return found
