"""OpenTelemetry spans of requests, kept in memory by the SDK's own exporter; and what a server
without them needs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from modelmill.core.errors import MissingDependency, UsageError
from modelmill.serve.request_handle import HttpRequestHandle
from modelmill.serve.traces import RequestTracer, _span_events
from tests.serve.service_thread import ServiceThread

pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel: pip install -e '.[otel]'")

SECRET = "Once upon a secret time"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans(running: ServiceThread) -> Iterator[Any]:
    """An exporter that keeps what it is given."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    running.service.traces = RequestTracer(provider)
    yield exporter
    running.service.traces = None
    provider.shutdown()


def one(exporter: Any) -> Any:
    (span,) = exporter.get_finished_spans()
    return span


@pytest.mark.parametrize(("stream", "tokens"), [(False, 12), (True, 12), (False, 1)])
def test_a_request_s_span(running: ServiceThread, spans: Any, stream: bool, tokens: int) -> None:
    body = {
        "model": "alias",
        "prompt": SECRET,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": stream,
        "ignore_eos": True,
    }
    headers = {"traceparent": PARENT, "x-request-id": "mine", "authorization": "Bearer key-of-mine"}
    assert running.post("/v1/completions", body, headers=headers).status == 200
    span = one(spans)
    assert span.name == "POST /v1/completions"
    assert format(span.context.trace_id, "032x") == PARENT.split("-")[1]
    assert format(span.parent.span_id, "016x") == PARENT.split("-")[2]
    attributes = dict(span.attributes)
    assert attributes["gen_ai.usage.output_tokens"] == tokens
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes["gen_ai.request.model"] == "stories"
    assert attributes["http.response.status_code"] == 200
    assert attributes["modelmill.request_id"] == "mine"
    names = [event.name for event in span.events]
    assert names == ["queue", "prefill", "decode"]
    moments = [span.start_time, *(event.timestamp for event in span.events), span.end_time]
    assert moments == sorted(moments)
    written = span.to_json()
    assert "secret" not in written.lower()
    assert "key-of-mine" not in written


@pytest.mark.parametrize("more", [{"stop": ["e", "a"]}, {"n": 3, "seed": 1}])
def test_a_span_counts_as_usage_does(
    running: ServiceThread, spans: Any, more: dict[str, Any]
) -> None:
    body = {"model": "stories", "prompt": SECRET, "max_tokens": 30, **more}
    usage = running.post("/v1/completions", body).json["usage"]
    attributes = dict(one(spans).attributes)
    assert attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert attributes["modelmill.cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]


def test_an_embedding_s_span_has_no_answer(running: ServiceThread, spans: Any) -> None:
    usage = running.post("/v1/embeddings", {"model": "stories", "input": [SECRET, "b"]}).json[
        "usage"
    ]
    attributes = dict(one(spans).attributes)
    assert attributes["gen_ai.operation.name"] == "embeddings"
    assert attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == 0
    assert not {"gen_ai.response.finish_reasons", "gen_ai.request.max_tokens"} & attributes.keys()


def test_a_first_token_is_where_it_was() -> None:
    """Seconds to the first token count from the request state's start, not from the handle's, which
    is made later.
    """
    answer = SimpleNamespace(first_token_seconds=0.5)
    ticket = SimpleNamespace(
        created_at=10.4,
        queue_seconds=0.05,
        request_states=[SimpleNamespace(start_time=10.0, output=answer)],
    )
    events = _span_events(cast(HttpRequestHandle, ticket))
    assert [name for name, _ in events] == ["queue", "prefill", "decode"]
    assert [moment for _, moment in events] == pytest.approx([10.4, 10.45, 10.5])


def test_a_refusal_and_an_unknown_path(running: ServiceThread, spans: Any) -> None:
    running.post("/v1/completions", {"model": "stories", "prompt": "a", "temperature": 9})
    running.get("/a/secret/path")
    refused, lost = spans.get_finished_spans()
    assert refused.attributes["http.response.status_code"] == 400
    assert refused.parent is None
    assert not refused.events
    assert lost.name == "GET"
    assert "secret" not in lost.to_json()


@pytest.mark.parametrize(
    "parent", ["", "00-0-0-0", "x" * 5000, "00-" + "0" * 32 + "-b7ad6b7169203331-01"]
)
def test_a_traceparent_that_is_none(running: ServiceThread, spans: Any, parent: str) -> None:
    assert running.get("/version", headers={"traceparent": parent}).status == 200
    assert one(spans).parent is None


def test_the_log_names_the_trace(
    running: ServiceThread, spans: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "modelmill.serve.access"):
        running.get("/version", headers={"traceparent": PARENT})
    (line,) = (record.data for record in caplog.records if record.name.endswith("access"))  # type: ignore[attr-defined]
    assert line["trace_id"] == PARENT.split("-")[1]


def test_a_collector_is_sent_spans(running: ServiceThread) -> None:
    """Over OTLP and HTTP, to a collector of our own."""
    import http.server
    import threading

    bodies: list[tuple[str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        running.service.traces = traces = RequestTracer.for_endpoint(
            f"http://127.0.0.1:{server.server_port}"
        )
        running.post("/v1/completions", {"model": "stories", "prompt": SECRET, "max_tokens": 2})
        running.service.traces = None
        traces.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    (path, body) = bodies[0]
    assert path == "/v1/traces"
    assert b"POST /v1/completions" in body
    assert b"secret" not in body


@pytest.mark.parametrize(
    "endpoint", ["", "localhost:4318", "ftp://a", "http://", "http://a:b", "http://[a"]
)
def test_an_endpoint_that_is_no_url(endpoint: str) -> None:
    with pytest.raises(UsageError, match="is not a URL"):
        RequestTracer.for_endpoint(endpoint)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(MissingDependency, match=r"-e .*\[otel\]"):
        RequestTracer.for_endpoint("http://localhost:4318")


def test_it_is_imported_only_when_asked_for(tmp_path: Path) -> None:
    find = "[n for n in sys.modules if 'opentelemetry.sdk' in n]"
    code = f"import sys, json, modelmill.serve.server; print(json.dumps({find}))"
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert json.loads(result.stdout) == []
