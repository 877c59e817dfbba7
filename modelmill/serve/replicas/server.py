"""The server process of ``modelmill serve --ray``; SIGHUP replaces its replicas one by one.

SIGTERM and SIGINT drain as in a server without replicas; the second ends running requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from functools import partial

from modelmill.core import log
from modelmill.core.errors import ModelmillError
from modelmill.serve.replicas.proxy import ReplicaProxy, with_middleware
from modelmill.serve.replicas.ray_cluster import RayReplicaSet
from modelmill.serve.server import ServerOptions, make_http_server, open_listening_socket
from modelmill.serve.service import Service

POLL_SECONDS = 0.5
"""Seconds between two checks of the replicas."""
MAX_FAILED_POLLS_BEFORE_EXIT = 20
"""Failed checks in a row after which the server ends."""
_log = log.get_logger("serve")


class RayFrontendServer:
    """All parts of one ``modelmill serve --ray``."""

    def __init__(self, cluster: RayReplicaSet, options: ServerOptions) -> None:
        self._cluster, self._options = cluster, options
        self._service = Service({}, options.limits)
        self._num_signals = 0
        self._stop_requested = asyncio.Event()
        self._restart_requested = asyncio.Event()

    async def run(self, on_listening: Callable[[str], None] = lambda _: None) -> None:
        """Serve until a signal.

        Args:
            on_listening: called with the address once the port is open.

        Raises:
            UsageError: the port cannot be opened.
            ModelmillError: no replica can be started.
        """
        sock = open_listening_socket(self._options.host, self._options.port)
        server = make_http_server(
            with_middleware(ReplicaProxy(self._cluster, self._service), self._service)
        )
        host, port = sock.getsockname()[:2]
        on_listening(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
        serving = asyncio.create_task(server.serve([sock]))
        supervising = asyncio.create_task(self._supervise_replicas())
        supervising.add_done_callback(lambda _: self._stop_requested.set())
        try:
            await self._stop_requested.wait()
            await self._drain()
        finally:
            server.should_exit = True
            if self._num_signals > 1:
                server.force_exit = True
            await serving
            supervising.cancel()
            (result,) = await asyncio.gather(supervising, return_exceptions=True)
            await asyncio.to_thread(self._cluster.stop)
            self._service.close()
        if isinstance(result, Exception):
            raise result

    async def _supervise_replicas(self) -> None:
        """Start the replicas and supervise them.

        Raises:
            ModelmillError: they cannot be started, or Ray is gone.
        """
        self._install_signal_handlers()
        await asyncio.to_thread(self._cluster.start)
        # Ray installs its own handlers when it starts
        self._install_signal_handlers()
        num_failed = 0
        while True:
            if self._restart_requested.is_set():
                self._restart_requested.clear()
                _log.info("replacing the replicas")
                await asyncio.to_thread(self._cluster.restart_replicas)
            try:
                await asyncio.to_thread(self._cluster.refresh_state)
                num_failed = 0
            except ModelmillError:
                raise
            except Exception as error:
                num_failed += 1
                _log.error(
                    "Ray does not answer",
                    extra={"data": {"error": type(error).__name__, "times": num_failed}},
                )
                if num_failed >= MAX_FAILED_POLLS_BEFORE_EXIT:
                    raise ModelmillError(
                        "Ray does not answer any more; start the server again"
                    ) from None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._restart_requested.wait(), POLL_SECONDS)

    def _install_signal_handlers(self) -> None:
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, partial(self._on_signal))
        loop.add_signal_handler(signal.SIGHUP, self._restart_requested.set)

    def _on_signal(self) -> None:
        self._num_signals += 1
        self._stop_requested.set()

    async def _drain(self) -> None:
        self._service.start_draining()
        deadline = asyncio.get_running_loop().time() + (
            self._options.drain_timeout if self._num_signals else 0
        )
        _log.info(
            "draining",
            extra={
                "data": {
                    "requests": self._service.num_active,
                    "seconds": self._options.drain_timeout,
                }
            },
        )
        while (
            self._service.num_active
            and self._num_signals < 2
            and asyncio.get_running_loop().time() < deadline
        ):
            await asyncio.sleep(0.02)
