"""The server process: starts engines, opens the port, and shuts down at a signal.

The first SIGTERM or SIGINT drains: new requests are refused, running ones may finish within
``drain_timeout``. The second ends them. If an engine cannot be kept running, the server ends with
an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import uvicorn
from starlette.types import ASGIApp

from modelmill.core import log
from modelmill.core.errors import ModelmillError, UsageError
from modelmill.serve import warmup
from modelmill.serve.app import REQUEST_MODELS, make_app
from modelmill.serve.catalogue.folder_watch import FolderWatch
from modelmill.serve.catalogue.manager import ModelManager, cancel_and_wait
from modelmill.serve.engine_client import EngineClient
from modelmill.serve.engine_state import EngineState
from modelmill.serve.http_protocol import MAX_HEADER_BYTES, HttpProtocol
from modelmill.serve.service import Service, ServiceLimits
from modelmill.serve.traces import RequestTracer

_log = log.get_logger("serve")

MAX_OPEN_FILES = 65_536
"""Limit of connections and files of one server, if the system allows so many."""


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server.

    Attributes:
        host: address to listen on.
        port: 0: a free one.
        drain_timeout: seconds for running requests at a shutdown.
        limits: as in ``Service``.
        traces: as in ``Service``.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    drain_timeout: float = 30.0
    limits: ServiceLimits = field(default_factory=ServiceLimits)
    traces: RequestTracer | None = None


class _UvicornServer(uvicorn.Server):
    """Does not handle signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signal handlers as they are; ``Server`` sets its own."""
        yield


class Server:
    """All parts of one ``modelmill serve``."""

    def __init__(
        self,
        engines: Sequence[EngineClient],
        options: ServerOptions,
        names: dict[str, EngineClient] | None = None,
        catalogue: ModelManager | None = None,
        watch: FolderWatch | None = None,
    ) -> None:
        self.options = options
        self.service = Service(
            names or {engine.name: engine for engine in engines},
            options.limits,
            traces=options.traces,
            catalogue=catalogue,
        )
        self._watch = watch
        if watch is not None:
            watch.set_callbacks(self.service.add_model, self.service.remove_model)
        self._num_signals = 0
        self._stop_requested = asyncio.Event()
        self._failed_engine: EngineClient | None = None

    async def run(
        self,
        on_listening: Callable[[str], None] = lambda _: None,
        on_engine_ready: Callable[[EngineClient], None] = lambda _: None,
    ) -> None:
        """Serve until a signal.

        Args:
            on_listening: called with the address.
            on_engine_ready: called with each engine once it is ready.

        Raises:
            UsageError: the port cannot be opened.
            ModelmillError: an engine cannot be opened or kept running.
        """
        _raise_open_file_limit()
        sock = open_listening_socket(self.options.host, self.options.port)
        self._app = make_app(self.service)
        await warmup.warm_up_routes(self._app, tuple(REQUEST_MODELS))
        server = make_http_server(self._app)
        host, port = sock.getsockname()[:2]
        on_listening(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
        tasks = [
            asyncio.create_task(self._run_engines(on_engine_ready)),
            asyncio.create_task(server.serve([sock])),
        ]
        catalogue = self.service.catalogue
        loading = None if catalogue is None else asyncio.create_task(catalogue.run())
        watching = None if self._watch is None else asyncio.create_task(self._watch.run())
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, self._on_signal)
        try:
            await self._stop_requested.wait()
            await self._drain()
        finally:
            server.should_exit = True
            if watching is not None:
                await cancel_and_wait(watching)
            for engine in self.service.always_loaded_engines:
                await engine.close()
            if catalogue is not None and loading is not None:
                await catalogue.close()
                await cancel_and_wait(loading)
            await asyncio.gather(*tasks)
            self.service.close()
        if self._failed_engine is not None:
            error_type = UsageError if self._failed_engine.is_usage_error else ModelmillError
            prefix = f"{self._failed_engine.name}: " if len(self.service.unique_engines) > 1 else ""
            raise error_type(prefix + (self._failed_engine.error or "an engine ended"))

    async def _run_engines(self, on_engine_ready: Callable[[EngineClient], None]) -> None:
        """Load the engines one after another, then supervise them."""
        tasks = []
        document = asyncio.create_task(warmup.warm_up_openapi(self._app))
        for engine in self.service.always_loaded_engines:
            if self._stop_requested.is_set():
                break
            tasks.append(asyncio.create_task(self._run_engine(engine)))
            await engine.load_finished.wait()
            if engine.state is EngineState.READY:
                await warmup.warm_up_text_processing(
                    self._app,
                    next(name for name, each in self.service.engines.items() if each is engine),
                )
                # a second signal may have stopped the engine during the warm-up
                if engine.state is EngineState.READY:
                    on_engine_ready(engine)
        await document
        warmup.freeze_gc()
        await asyncio.gather(*tasks)

    async def _run_engine(self, engine: EngineClient) -> None:
        await engine.supervise_worker()
        if engine.state is EngineState.FAILED:
            self._failed_engine = self._failed_engine or engine
            self._stop_requested.set()

    def _on_signal(self) -> None:
        self._num_signals += 1
        self._stop_requested.set()
        if self._num_signals > 1:
            self._abort_all("the server was stopped")

    async def _drain(self) -> None:
        """Refuse new requests and wait for running ones, up to the timeout."""
        service = self.service
        service.start_draining()
        _log.info(
            "draining",
            extra={"data": {"requests": service.num_active, "seconds": self.options.drain_timeout}},
        )
        deadline = asyncio.get_running_loop().time() + (
            0 if self._failed_engine else self.options.drain_timeout
        )
        while (
            service.num_active
            and self._num_signals < 2
            and asyncio.get_running_loop().time() < deadline
        ):
            await asyncio.sleep(0.02)
        self._abort_all("the server is shutting down")
        for _ in range(50):
            if not service.num_active:
                break
            await asyncio.sleep(0.02)

    def _abort_all(self, reason: str) -> None:
        """End every request, also those that wait for a model to load."""
        if self.service.catalogue is not None:
            self.service.catalogue.reject_pending_and_future_loads()
        for engine in self.service.unique_engines:
            engine.abort_all(reason)


def make_http_server(app: ASGIApp) -> uvicorn.Server:
    """Make an HTTP server for given sockets; signals are left to the caller."""
    config = uvicorn.Config(
        app,
        http=HttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )
    return _UvicornServer(config)


def _raise_open_file_limit() -> None:
    """Raise the limit of open files from the usual 1,024 to what the system allows."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return
    with contextlib.suppress(ValueError, OSError):  # a system may refuse even its own limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def open_listening_socket(host: str, port: int) -> socket.socket:
    """Open a listening socket.

    Raises:
        UsageError: the address cannot be used.
    """
    try:
        family, socket_type, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        sock = socket.socket(family, socket_type, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"--port {port} is in use; choose another, or end a server of yours: "
                f"modelmill ps lists them, modelmill stop {port} ends the one at this port"
            ) from None
        raise UsageError(
            f"--host {host} --port {port}: {error.strerror or error}; choose another"
        ) from None
    sock.setblocking(False)
    return sock
