"""A service that runs on a thread of its own with its own event loop, for tests that call it one by
one.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from modelmill.serve.app import make_app
from modelmill.serve.engine_client import EngineClient
from modelmill.serve.service import Service, ServiceLimits
from modelmill.serve.worker_messages import OpenEngine
from modelmill.text_processor import TextProcessor
from tests.serve.asgi_client import Client, Response
from tests.wait import TIMEOUT_SECONDS

T = TypeVar("T")
RUN = {"device": "cpu", "threads": 1, "max_num_seqs": 16, "kv_cache_bytes": 8 << 20}


def with_long_stats_timeout(engine: EngineClient) -> EngineClient:
    """The same engine, but ``stats`` waits for the worker instead of returning old values after a
    second.
    """
    engine.stats = functools.partial(engine.stats, TIMEOUT_SECONDS)  # type: ignore[method-assign]
    return engine


class ServiceThread:
    """``run`` runs a coroutine on the service's event loop; ``get`` and ``post`` call its
    application.
    """

    def __init__(
        self,
        path: Path,
        limits: ServiceLimits | None = None,
        template: str | None = "chatml",
        **run: Any,
    ) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.service: Service = self.run(
            self._make_service(path, limits or ServiceLimits(), template, {**RUN, **run})
        )
        self.engine = self.service.unique_engines[0]
        self.client = Client(make_app(self.service))

    async def _make_service(
        self, path: Path, limits: ServiceLimits, template: str | None, run: dict[str, Any]
    ) -> Service:
        engine = with_long_stats_timeout(
            EngineClient(
                "stories", OpenEngine(str(path), {}, run, chat_template=template), max_waiting=512
            )
        )
        self._task = asyncio.create_task(engine.supervise_worker())
        await engine.load_finished.wait()
        assert engine.error is None, engine.error
        return Service({"stories": engine, "alias": engine}, limits)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(120)

    def get(self, path: str, **options: Any) -> Response:
        return self.run(self.client.get(path, **options))

    def post(self, path: str, body: Any = None, **options: Any) -> Response:
        return self.run(self.client.post(path, body, **options))

    def limited_client(self, key: str | None = None, **limits: Any) -> Client:
        """A client of another application with the same engines and these limits.

        It counts in the same metrics: an engine has one place to count.
        """
        service = Service(self.service.engines, ServiceLimits(**limits), self.service.metrics)
        return Client(make_app(service), key)

    @contextmanager
    def other_template(self, template: str) -> Iterator[Self]:
        """The same worker with another chat template, which only the process of the API reads."""
        engine = self.engine
        before = engine._text_processor
        engine._text_processor = TextProcessor.from_engine(engine.path, template)
        yield self
        engine._text_processor = before

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        async def end() -> None:
            await self.engine.close()
            await self._task

        self.run(end())
        self.service.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
