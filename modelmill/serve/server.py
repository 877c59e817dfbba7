"""The process that serves: engines are started, the port is opened, and at a signal what runs is brought to its end.

The first SIGTERM or SIGINT drains: new requests are refused, running ones may finish within the time that was given.
The second ends them. An engine that cannot be kept alive ends the server with an error.
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
from modelmill.serve.app import make_app
from modelmill.serve.engine import Engine, State
from modelmill.serve.http import HEADER_BYTES, Http
from modelmill.serve.service import Limits, Service
from modelmill.serve.traces import Traces

_log = log.get("serve")

OPEN_FILES = 65_536
"""Connections and files of one server, where the system allows them."""


@dataclass(frozen=True)
class Place:
    """Where and how long. patience: seconds for running answers at a shutdown. traces: as in ``Service``."""

    host: str = "127.0.0.1"
    port: int = 8000
    patience: float = 30.0
    limits: Limits = field(default_factory=Limits)
    traces: Traces | None = None


class _Uvicorn(uvicorn.Server):
    """Leaves the signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing is captured."""
        yield


class Server:
    """Everything of one ``modelmill serve``."""

    def __init__(self, engines: Sequence[Engine], place: Place, names: dict[str, Engine] | None = None) -> None:
        self.place = place
        self.service = Service(names or {engine.name: engine for engine in engines}, place.limits, traces=place.traces)
        self._signals = 0
        self._asked = asyncio.Event()
        self._failed: Engine | None = None

    async def run(
        self, opened: Callable[[str], None] = lambda _: None, loaded: Callable[[Engine], None] = lambda _: None
    ) -> None:
        """Serve until a signal. opened: told the address once the port is open. loaded: told each engine that is ready.

        Raises UsageError where the port cannot be had, ModelmillError where an engine cannot be opened or kept.
        """
        _raise_open_files()
        sock = listen(self.place.host, self.place.port)
        server = http_server(make_app(self.service))
        host, port = sock.getsockname()[:2]
        opened(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
        tasks = [asyncio.create_task(self._engines(loaded)), asyncio.create_task(server.serve([sock]))]
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, self._signalled)
        try:
            await self._asked.wait()
            await self._drain()
        finally:
            server.should_exit = True
            for engine in self.service.distinct:
                await engine.close()
            await asyncio.gather(*tasks)
            self.service.close()
        if self._failed is not None:
            kind = UsageError if self._failed.usage else ModelmillError
            whose = f"{self._failed.name}: " if len(self.service.distinct) > 1 else ""
            raise kind(whose + (self._failed.error or "an engine ended"))

    async def _engines(self, loaded: Callable[[Engine], None]) -> None:
        """Load one after another, then watch them."""
        lives = []
        for engine in self.service.distinct:
            if self._asked.is_set():
                break
            lives.append(asyncio.create_task(self._life(engine)))
            await engine.settled.wait()
            if engine.state is State.READY:
                loaded(engine)
        await asyncio.gather(*lives)

    async def _life(self, engine: Engine) -> None:
        await engine.run()
        if engine.state is State.FAILED:
            self._failed = self._failed or engine
            self._asked.set()

    def _signalled(self) -> None:
        self._signals += 1
        self._asked.set()
        if self._signals > 1:
            for engine in self.service.distinct:
                engine.abort_all("the server was stopped")

    async def _drain(self) -> None:
        """Refuse what is new and wait for what runs, as long as it may take."""
        service = self.service
        service.draining = True
        _log.info("draining", extra={"data": {"requests": service.active, "seconds": self.place.patience}})
        deadline = asyncio.get_running_loop().time() + (0 if self._failed else self.place.patience)
        while service.active and self._signals < 2 and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        for engine in service.distinct:
            engine.abort_all("the server is shutting down")
        for _ in range(50):
            if not service.active:
                break
            await asyncio.sleep(0.02)


def http_server(app: ASGIApp) -> uvicorn.Server:
    """Serves an application on sockets that it is given; leaves the signals to others."""
    config = uvicorn.Config(
        app,
        http=Http,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=HEADER_BYTES,
    )
    return _Uvicorn(config)


def _raise_open_files() -> None:
    """As many open connections as the system allows this process, not the 1,024 that shells begin with."""
    import resource

    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if most == resource.RLIM_INFINITY else min(most, OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    with contextlib.suppress(ValueError, OSError):  # a system may refuse more than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UsageError where the address cannot be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)
    except OSError as error:
        raise UsageError(f"--host {host} --port {port}: {error.strerror or error}; choose another") from None
    sock.setblocking(False)
    return sock
