"""The process that serves: engines are started, the port is opened, and at a signal what runs is
brought to its end.

The first SIGTERM or SIGINT drains: new requests are refused, running ones may finish within the
time that was given. The second ends them. An engine that cannot be kept alive ends the server with
an error.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from modelmill.serve.engine_client import EngineClient, EngineState
from modelmill.serve.http_protocol import HEADER_BYTES, HttpProtocol
from modelmill.serve.service import Service, ServiceLimits
from modelmill.serve.traces import Traces

_log = log.get_logger("serve")

MAX_OPEN_FILES = 65_536
"""Connections and files of one server, where the system allows them."""


@dataclass(frozen=True)
class ServerOptions:
    """Where and how long.

    drain_timeout: seconds for running answers at a shutdown. traces: as in ``Service``.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    drain_timeout: float = 30.0
    limits: ServiceLimits = field(default_factory=ServiceLimits)
    traces: Traces | None = None


class _UvicornServer(uvicorn.Server):
    """Leaves the signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing is captured."""
        yield


class Server:
    """Everything of one ``modelmill serve``."""

    def __init__(
        self,
        engines: Sequence[EngineClient],
        options: ServerOptions,
        names: dict[str, EngineClient] | None = None,
    ) -> None:
        self.options = options
        self.service = Service(
            names or {engine.name: engine for engine in engines},
            options.limits,
            traces=options.traces,
        )
        self._num_signals = 0
        self._stop_requested = asyncio.Event()
        self._failed_engine: EngineClient | None = None

    async def run(
        self,
        on_listening: Callable[[str], None] = lambda _: None,
        on_engine_ready: Callable[[EngineClient], None] = lambda _: None,
    ) -> None:
        """Serve until a signal. on_listening: called with the address; on_engine_ready: with each
        engine.

        Raises UsageError where the port cannot be had, ModelmillError where an engine cannot be
        opened or kept.
        """
        _raise_open_file_limit()
        sock = open_socket(self.options.host, self.options.port)
        self._app = make_app(self.service)
        await warmup.warm_up_routes(self._app, tuple(REQUEST_MODELS))
        server = http_server(self._app)
        host, port = sock.getsockname()[:2]
        on_listening(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
        tasks = [
            asyncio.create_task(self._run_engines(on_engine_ready)),
            asyncio.create_task(server.serve([sock])),
        ]
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, self._on_signal)
        try:
            await self._stop_requested.wait()
            await self._drain()
        finally:
            server.should_exit = True
            for engine in self.service.unique_engines:
                await engine.close()
            await asyncio.gather(*tasks)
            self.service.close()
        if self._failed_engine is not None:
            kind = UsageError if self._failed_engine.is_usage_error else ModelmillError
            whose = f"{self._failed_engine.name}: " if len(self.service.unique_engines) > 1 else ""
            raise kind(whose + (self._failed_engine.error or "an engine ended"))

    async def _run_engines(self, on_engine_ready: Callable[[EngineClient], None]) -> None:
        """Load one after another, then watch them."""
        lives = []
        document = asyncio.create_task(warmup.warm_up_openapi(self._app))
        for engine in self.service.unique_engines:
            if self._stop_requested.is_set():
                break
            lives.append(asyncio.create_task(self._run_engine(engine)))
            await engine.load_finished.wait()
            if engine.state is EngineState.READY:
                await warmup.warm_up_engine(
                    self._app,
                    next(name for name, each in self.service.engines.items() if each is engine),
                )
                on_engine_ready(engine)
        await document
        warmup.freeze_gc()
        await asyncio.gather(*lives)

    async def _run_engine(self, engine: EngineClient) -> None:
        await engine.run()
        if engine.state is EngineState.FAILED:
            self._failed_engine = self._failed_engine or engine
            self._stop_requested.set()

    def _on_signal(self) -> None:
        self._num_signals += 1
        self._stop_requested.set()
        if self._num_signals > 1:
            for engine in self.service.unique_engines:
                engine.abort_all("the server was stopped")

    async def _drain(self) -> None:
        """Refuse what is new and wait for what runs, as long as it may take."""
        service = self.service
        service.draining = True
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
        for engine in service.unique_engines:
            engine.abort_all("the server is shutting down")
        for _ in range(50):
            if not service.num_active:
                break
            await asyncio.sleep(0.02)


def http_server(app: ASGIApp) -> uvicorn.Server:
    """Serves an application on sockets that it is given; leaves the signals to others."""
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
        h11_max_incomplete_event_size=HEADER_BYTES,
    )
    return _UvicornServer(config)


def _raise_open_file_limit() -> None:
    """As many open connections as the system allows this process, not the 1,024 that shells begin
    with.
    """
    import resource

    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if most == resource.RLIM_INFINITY else min(most, MAX_OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    with contextlib.suppress(ValueError, OSError):  # a system may refuse more than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UsageError where the address cannot be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)
    except OSError as error:
        raise UsageError(
            f"--host {host} --port {port}: {error.strerror or error}; choose another"
        ) from None
    sock.setblocking(False)
    return sock
