"""OpenTelemetry traces: a span for each request, made when it has ended, so that it costs nothing while it runs.

Ids, counts and times are in a span; prompts, answers and keys are not. The library is imported when traces are asked
for, and only then.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from modelmill import __version__
from modelmill.core.errors import MissingDependency, UsageError
from modelmill.serve.ticket import Ticket

NAME = "modelmill.serve"
SECOND = 1_000_000_000
"""In nanoseconds, which are a span's unit."""


@dataclass(frozen=True)
class Visited:
    """A request that has ended. scope: of ASGI, after routing. began: by time.perf_counter. status: None: cut off."""

    scope: Mapping[str, Any]
    headers: Mapping[bytes, bytes]
    request_id: str
    status: int | None
    began: float


class Traces:
    """Makes spans and hands them to an exporter."""

    def __init__(self, provider: Any) -> None:
        """provider: a TracerProvider, which is shut down by ``close``."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer(NAME, __version__)
        self._context = TraceContextTextMapPropagator()

    @staticmethod
    def to(endpoint: str) -> Traces:
        """Spans go to a collector over OTLP and HTTP; a URL without a path means its /v1/traces.

        Raises UsageError for what is no URL, MissingDependency without the libraries.
        """
        where = collector(endpoint)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError as missing:
            raise MissingDependency(
                f"--otlp-endpoint needs {missing.name}; install it with: pip install 'modelmill[otel]'"
            ) from None
        resource = Resource.create({"service.name": "modelmill", "service.version": __version__})
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=where, timeout=5)))
        return Traces(provider)

    def told(self, visited: Visited) -> str:
        """Make the span of a request; returns its trace's id, 32 hexadecimal digits."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        scope, now, clock = visited.scope, time.time_ns(), time.perf_counter()

        def at(moment: float) -> int:
            return now - int((clock - moment) * SECOND)

        route = getattr(scope.get("route"), "path", None)
        # a path that is none of ours may hold anything
        name = f"{scope['method']} {route}" if route else str(scope["method"])
        span = self._tracer.start_span(
            name, context=self._parent(visited.headers), kind=SpanKind.SERVER, start_time=at(visited.began)
        )
        span.set_attributes({"http.request.method": scope["method"], "modelmill.request_id": visited.request_id})
        if route:
            span.set_attribute("http.route", route)
        if visited.status is not None:
            span.set_attribute("http.response.status_code", visited.status)
        if visited.status is None or visited.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        ticket = scope.get("modelmill.ticket")
        if isinstance(ticket, Ticket):
            span.set_attributes(_attributes(ticket, scope.get("modelmill.engine")))
            for event, moment in _events(ticket):
                span.add_event(event, timestamp=at(moment))
        span.end(end_time=now)
        return format(span.get_span_context().trace_id, "032x")

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def _parent(self, headers: Mapping[bytes, bytes]) -> Any:
        """What the caller's traceparent and tracestate (W3C) say."""
        names = ("traceparent", "tracestate")
        carrier = {name: headers[name.encode()].decode("latin-1") for name in names if name.encode() in headers}
        return self._context.extract(carrier)


def collector(endpoint: str) -> str:
    """The URL that spans are sent to. Raises UsageError for what is no URL."""
    try:
        parts = urlsplit(endpoint)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or parts.scheme not in ("http", "https"):
        raise UsageError(f"--otlp-endpoint {endpoint[:100]!r} is no URL; give http://HOST:4318")
    return endpoint if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1/traces"


def _attributes(ticket: Ticket, engine: str | None) -> dict[str, Any]:
    """By OpenTelemetry's conventions for generative AI, where they have a name."""
    counts = ticket.counts()
    request = ticket.dialogues[0].request
    params, embeds = request.params, request.pooling is not None
    outputs = [output for each in ticket.dialogues for output in each.answer.outputs]
    reasons = {output.finish_reason or ticket.broken_off for output in outputs}
    found: dict[str, Any] = {
        "gen_ai.operation.name": "embeddings" if embeds else "text_completion",
        "gen_ai.request.model": engine,
        "gen_ai.request.max_tokens": None if embeds else params.max_tokens,
        "gen_ai.request.temperature": None if embeds else params.temperature,
        "gen_ai.request.top_p": None if embeds else params.top_p,
        "gen_ai.request.choice.count": None if embeds else ticket.weight,
        "gen_ai.response.finish_reasons": None if embeds else sorted(reasons),
        "gen_ai.usage.input_tokens": counts["prompt_tokens"],
        "gen_ai.usage.output_tokens": counts["completion_tokens"],
        "modelmill.cached_tokens": counts["cached_tokens"],
        "modelmill.queue_seconds": ticket.queued,
    }
    return {name: value for name, value in found.items() if value is not None}


def _events(ticket: Ticket) -> list[tuple[str, float]]:
    """When the first of its prompts was queued, left the queue, and had its first token; by time.perf_counter."""
    found = [("queue", ticket.made)]
    if ticket.queued is not None:
        found.append(("prefill", ticket.made + ticket.queued))
    answers = [(each.started, each.answer.first_token_seconds) for each in ticket.dialogues]
    first = [started + seconds for started, seconds in answers if seconds is not None]
    if first:
        # what queued was counted by the engine's process: its clock may run a little otherwise
        found.append(("decode", max(found[-1][1], min(first))))
    return found
