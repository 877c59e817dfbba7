"""Priorities, shares and limits over HTTP, with a worker whose steps the test holds up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from modelmill.serve.access.key_policy import KeyPolicy
from modelmill.serve.app import make_app
from modelmill.serve.service import Service, ServiceLimits
from tests.runtime import tiny
from tests.serve.asgi_client import Client, Response
from tests.serve.thread_worker import ThreadLauncher, served_engine

COMPLETION = {"model": "tiny", "temperature": 0, "max_tokens": 2, "ignore_eos": True}


class EndedInOrder(dict[str, Any]):
    """An engine's requests; responses end in an order that the event loop chooses."""

    def __init__(self, requests: dict[str, Any]) -> None:
        super().__init__(requests)
        self.ended: list[str] = []

    def pop(self, id: str, default: Any = None) -> Any:
        if id in self:
            self.ended.append(id)
        return super().pop(id, default)


@dataclass
class QueueService:
    """A service of an engine that runs one sequence at a time."""

    launcher: ThreadLauncher
    service: Service

    def post(self, key: str | None, prompt: int, **more: Any) -> asyncio.Task[Response]:
        """Send a completion of one token of prompt."""
        body = {"prompt": [prompt], **COMPLETION, **more}
        client = Client(make_app(self.service), key)
        return asyncio.ensure_future(client.post("/v1/completions", body))

    async def order(self, requests: list[tuple[str | None, dict[str, Any]]]) -> list[int]:
        """In which order the engine ends requests that wait behind a running one."""
        worker = self.launcher.children[-1]
        worker.allow_steps.clear()
        engine = self.service.unique_engines[0]
        client = engine.generation_client
        active = client.active_requests = EndedInOrder(client.active_requests)
        tasks = []
        # its steps give the worker time to read all that is sent behind it
        running = (requests[0][0], {"max_tokens": 24})
        for number, (key, more) in enumerate([running, *requests]):
            tasks.append(self.post(key, number + 1, **more))
            async with asyncio.timeout(50):
                while len(active) <= number:
                    await asyncio.sleep(0.001)
        sent = list(active)
        worker.allow_steps.set()
        for task in tasks:
            response = await task
            assert response.status == 200, response.body
        assert active.ended[0] == sent[0], "it was running"
        return [sent.index(each) - 1 for each in active.ended[1:]]


@contextlib.asynccontextmanager
async def queue_service(**limits: Any) -> AsyncIterator[QueueService]:
    launcher = ThreadLauncher(lambda: tiny.make_engine(max_num_seqs=1))
    async with served_engine(launcher) as (engine, _):
        service = Service({"tiny": engine}, ServiceLimits(**limits))
        try:
            yield QueueService(launcher, service)
        finally:
            service.close()


def test_a_lower_priority_starts_earlier() -> None:
    async def main() -> None:
        async with queue_service() as served:
            requests = [(None, {"priority": each}) for each in (5, 0, -3, 5, 1)]
            assert await served.order(requests) == [2, 1, 4, 0, 3]
            assert await served.order([(None, {})] * 4) == [0, 1, 2, 3]

    asyncio.run(main())


KEYS = (
    KeyPolicy("a", "key-a"),
    KeyPolicy("b", "key-b"),
    KeyPolicy("late", "key-late", priority=10),
    KeyPolicy("few", "key-few", requests_per_minute=2),
    KeyPolicy("small", "key-small", tokens_per_minute=3),
    KeyPolicy("one", "key-one", max_parallel_requests=1),
)


def test_keys_take_turns_and_their_priorities_add() -> None:
    async def main() -> None:
        async with queue_service(key_policies=KEYS) as served:
            requests = [("key-a", {})] * 4 + [("key-b", {})] * 2
            order = await served.order(requests)
            assert order.index(4) < order.index(1)
            assert order.index(5) < order.index(3)
            assert [each for each in order if each < 4] == [0, 1, 2, 3]
            late = await served.order(
                [("key-late", {}), ("key-a", {"priority": 11}), ("key-b", {})]
            )
            assert late == [2, 0, 1]
            refused = await served.post("key-a", 3, priority=-1)
            assert (refused.status, refused.json["error"]["param"]) == (400, "priority")

    asyncio.run(main())


def test_limits_are_429_with_a_reason() -> None:
    async def main() -> None:
        async with queue_service(key_policies=KEYS) as served:
            for _ in range(2):
                assert (await served.post("key-few", 3)).status == 200
            refused = await served.post("key-few", 3)
            assert refused.status == 429
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert "the key few may use 2 requests a minute" in refused.json["error"]["message"]
            assert (await served.post("key-small", 3)).status == 200  # one of prompt, two of answer
            assert (await served.post("key-small", 3)).status == 429
            worker = served.launcher.children[-1]
            worker.allow_steps.clear()
            running = served.post("key-one", 3)
            engine = served.service.unique_engines[0]
            async with asyncio.timeout(50):
                while not engine.generation_client.active_requests:
                    await asyncio.sleep(0.001)
            assert (await served.post("key-one", 3)).status == 429
            worker.allow_steps.set()
            assert (await running).status == 200
            assert (await served.post("key-one", 3)).status == 200
            page = (await Client(make_app(served.service), "key-a").get("/metrics")).body.decode()
            assert 'modelmill:key_tokens_total{key_name="small"} 3.0' in page
            line = 'modelmill:key_refusals_total{key_name="few",limit="requests_per_minute"} 1.0'
            assert line in page

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/chat", "/v1/messages"])
def test_every_dialect_counts(path: str) -> None:
    """A request that its engine refuses counts as well: this one has no tokenizer."""

    async def main() -> None:
        async with queue_service(key_policies=KEYS) as served:
            client = Client(make_app(served.service), "key-few")
            body: dict[str, Any] = {"model": "tiny", "priority": 3, "max_tokens": 3}
            body["messages"] = [{"role": "user", "content": "Hi"}]
            if path == "/v1/embeddings":
                body = {"model": "tiny", "priority": 3, "input": "Hi"}
            if path == "/api/chat":
                del body["max_tokens"]
            statuses = [(await client.post(path, body)).status for _ in range(3)]
            assert statuses == [400, 400, 429]

    asyncio.run(main())
