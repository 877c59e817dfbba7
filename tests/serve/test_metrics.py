"""How long requests waited, in a server's metrics."""

from __future__ import annotations

from typing import Any

import pytest

from modelmill.core.types import EngineStats
from modelmill.serve.metrics import ServerMetrics
from tests.serve.service_thread import ServiceThread

STATE_SAMPLES = {"bytes": 640, "snapshots_limit": 4, "snapshots": 3, "hits_total": 2}


def sampled(body: bytes) -> dict[str, str]:
    """The page's samples."""
    lines = body.decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))


def queued(running: ServiceThread) -> tuple[float, float]:
    """Requests that left the queue, and the seconds they waited."""
    samples = sampled(running.get("/metrics").body)
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


def test_recurrent_states_are_on_the_page() -> None:
    stats = EngineStats(
        1, 0, 8, 8, 0, 1, 1, 1, 0, 0,
        state_bytes=640, snapshot_slots=4, snapshots=3, restored_states=2,
    )  # fmt: skip
    samples = sampled(ServerMetrics().render([("hybrid", stats)]))
    label = '{model_name="hybrid"}'
    read = {name: float(samples[f"modelmill:state_cache_{name}{label}"]) for name in STATE_SAMPLES}
    assert read == STATE_SAMPLES


def test_pages_in_use_are_counted_by_window() -> None:
    stats = EngineStats(
        1, 0, 8, 3, 0, 1, 1, 1, 0, 0, page_bytes=64, pages_by_window={"all": 3, "128": 2}
    )
    samples = sampled(ServerMetrics().render([("mixed", stats)]))
    name = 'modelmill:kv_cache_in_use_bytes{model_name="mixed",window="%s"}'
    assert float(samples[name % "all"]) == 3 * 64
    assert float(samples[name % "128"]) == 2 * 64
