"""How long requests waited, in a server's metrics."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.service_thread import ServiceThread


def queued(running: ServiceThread) -> tuple[float, float]:
    """Requests that left the queue, and the seconds they waited."""
    lines = running.get("/metrics").body.decode().splitlines()
    samples = dict(line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    name, label = "modelmill:request_queue_time_seconds", '{model_name="stories"}'
    return float(samples[f"{name}_count{label}"]), float(samples[f"{name}_sum{label}"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a b c", "max_tokens": 1}),
        ("/v1/completions", {"prompt": "a b c", "max_tokens": 0, "echo": True}),
        ("/v1/completions", {"prompt": "a b c", "max_tokens": 1, "n": 3}),
        ("/v1/completions", {"prompt": "a b c", "max_tokens": 4}),
        ("/v1/embeddings", {"input": "a b c"}),
    ],
)
def test_every_request_is_counted_once(
    running: ServiceThread, path: str, body: dict[str, Any]
) -> None:
    before, _ = queued(running)
    for _ in range(3):
        assert running.post(path, {"model": "stories", **body}).status == 200
    assert queued(running)[0] == before + 3
