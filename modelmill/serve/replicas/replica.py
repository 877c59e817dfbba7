"""One replica: the whole application of a server, called by the proxy without a port."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ray import serve

from modelmill.core.errors import ModelmillError
from modelmill.serve import warmup
from modelmill.serve.app import REQUEST_MODELS, make_app
from modelmill.serve.engine_client import EngineClient
from modelmill.serve.engine_state import EngineState
from modelmill.serve.json_logs import log_to_stderr
from modelmill.serve.replicas.asgi_call import call_asgi_app
from modelmill.serve.replicas.deployment import ReplicaSpec
from modelmill.serve.service import Service, ServiceLimits
from modelmill.serve.traces import RequestTracer


class Replica:
    """Created, checked and called by Ray Serve."""

    async def __init__(self, replica_spec: ReplicaSpec) -> None:  # type: ignore[misc]
        """Open the engines, one after another.

        Raises:
            ModelmillError: an engine cannot be opened.
        """
        self._logs = contextlib.ExitStack()
        self._logs.enter_context(log_to_stderr(replica_spec.log_level))
        self._id = serve.get_replica_context().replica_id.unique_id
        engines = [
            EngineClient(name, open_engine, max_waiting=replica_spec.max_waiting)
            for name, open_engine in zip(
                replica_spec.names, replica_spec.open_messages, strict=True
            )
        ]
        traces = (
            None
            if replica_spec.otlp_endpoint is None
            else RequestTracer.for_endpoint(replica_spec.otlp_endpoint)
        )
        # keys and host names are checked by the proxy
        by_name = {engine.name: engine for engine in engines}
        self._service = Service(
            by_name | {alias: by_name[name] for alias, name in replica_spec.aliases},
            ServiceLimits(
                max_body_bytes=replica_spec.max_body_bytes,
                max_text_body_bytes=replica_spec.max_text_body_bytes,
                response_store_bytes=0,  # another replica would not have them
            ),
            traces=traces,
        )
        self._app = make_app(self._service)
        await warmup.warm_up_routes(self._app, tuple(REQUEST_MODELS))
        self._engine_tasks = []
        for engine in engines:
            self._engine_tasks.append(asyncio.create_task(engine.supervise_worker()))
            await engine.load_finished.wait()
            if engine.state is EngineState.FAILED:
                raise ModelmillError(engine.error or f"the engine {engine.name} ended")
            await warmup.warm_up_text_processing(self._app, engine.name)
        warmup.freeze_gc()

    async def call(
        self,
        head: dict[str, Any],
        body: bytes,
        prefix: Sequence[str] = (),  # noqa: ARG002  the router reads it
        avoid: Sequence[str] = (),  # noqa: ARG002
    ) -> AsyncGenerator[Any]:
        """Run a request; yield this replica's id, then (status, headers), then the body in chunks.

        Closing the generator aborts the request.

        Args:
            head: method, path, query and headers.
            body: of the request.
            prefix: for the router.
            avoid: for the router.
        """
        yield self._id
        async with contextlib.aclosing(call_asgi_app(self._app, head, body)) as response:
            async for part in response:
                yield part

    async def metrics_page(self) -> tuple[str, bytes]:
        """This replica's id and its metrics."""
        engine_stats = [
            (engine.name, stats)
            for engine in self._service.unique_engines
            if (stats := await engine.stats()) is not None
        ]
        return self._id, self._service.metrics.render(engine_stats)

    async def check_health(self) -> None:
        """Check that all engines work; Ray Serve replaces the replica otherwise.

        Raises:
            ModelmillError: an engine has failed.
        """
        for engine in self._service.unique_engines:
            if engine.state in (EngineState.FAILED, EngineState.STOPPED):
                raise ModelmillError(engine.error or f"the engine {engine.name} ended")
