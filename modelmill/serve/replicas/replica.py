"""One replica: the whole application of a server, called by the front instead of over a port of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ray import serve

from modelmill.core.errors import ModelmillError
from modelmill.serve.app import make_app
from modelmill.serve.engine import Engine, State
from modelmill.serve.logs import to_stderr
from modelmill.serve.replicas.call import parts
from modelmill.serve.replicas.plan import Plan
from modelmill.serve.service import Limits, Service
from modelmill.serve.traces import Traces


class Replica:
    """Ray Serve makes these, asks them for their health, and hands them requests."""

    async def __init__(self, plan: Plan) -> None:  # type: ignore[misc]
        """Opens the engines, one after another. Raises ModelmillError where one cannot be opened."""
        self._logs = contextlib.ExitStack()
        self._logs.enter_context(to_stderr(plan.level))
        self._id = serve.get_replica_context().replica_id.unique_id
        engines = [Engine(name, order, queue=plan.queue) for name, order in zip(plan.names, plan.orders, strict=True)]
        traces = None if plan.otlp is None else Traces.to(plan.otlp)
        # who may enter, and under which name, the front has seen to
        self._service = Service(
            {engine.name: engine for engine in engines}, Limits(body=plan.body, text=plan.text), traces=traces
        )
        self._app = make_app(self._service)
        self._lives = []
        for engine in engines:
            self._lives.append(asyncio.create_task(engine.run()))
            await engine.settled.wait()
            if engine.state is State.FAILED:
                raise ModelmillError(engine.error or f"the engine {engine.name} ended")

    async def call(
        self,
        head: dict[str, Any],
        body: bytes,
        prefix: Sequence[str] = (),  # noqa: ARG002  the router reads it
        avoid: Sequence[str] = (),  # noqa: ARG002
    ) -> AsyncGenerator[Any]:
        """A request: first this replica's id, then (status, headers), then the body in pieces.

        head: method, path, query and headers. prefix and avoid are for the router. Leaving it aborts the request.
        """
        yield self._id
        async with contextlib.aclosing(parts(self._app, head, body)) as told:
            async for part in told:
                yield part

    async def page(self) -> tuple[str, bytes]:
        """This replica's id and its page of metrics."""
        told = [
            (engine.name, stats) for engine in self._service.distinct if (stats := await engine.stats()) is not None
        ]
        return self._id, self._service.metrics.page(told)

    async def check_health(self) -> None:
        """Raises where an engine has ended for good; Ray Serve then puts another replica in this one's place."""
        for engine in self._service.distinct:
            if engine.state in (State.FAILED, State.STOPPED):
                raise ModelmillError(engine.error or f"the engine {engine.name} ended")
