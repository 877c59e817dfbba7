"""Requests made of hostile parts at random: an answer or a refusal in its form, never a bug, and
the engine goes on.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.serve.asgi_client import Response
from tests.serve.segment_service import SegmentService
from tests.serve.service_thread import ServiceThread
from tests.trust.test_serving import idle
from tools.soak.hostile_requests import random_request, response_problem

COUNT = 600


@pytest.fixture(scope="module")
def running(running_with_sam: SegmentService) -> SegmentService:
    return running_with_sam


def hunt(running: ServiceThread, seed: int, count: int) -> None:
    rng = random.Random(seed)
    requests = [random_request(rng, segment_model="sam") for _ in range(count)]

    async def some(part: list[tuple[str, bytes]]) -> list[Response]:
        return await asyncio.gather(*(running.client.post(path, data) for path, data in part))

    for begin in range(0, count, 20):
        part = requests[begin : begin + 20]
        for (_, data), response in zip(part, running.run(some(part))):
            why = response_problem(response.status, response.body)
            assert why is None, (why, data[:2000], response.body[:500])


def test_hostile_requests_at_random(running: SegmentService) -> None:
    pids = running.engine.pid, running.segment_engine.pid
    hunt(running, 0, COUNT)
    idle(running)
    assert (running.engine.pid, running.segment_engine.pid) == pids
    assert running.service.num_active == 0
