"""The process that clients reach, with replicas behind it. SIGHUP replaces them one after another.

SIGTERM and SIGINT drain as in a server without replicas; the second ends what runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from functools import partial

from modelmill.core import log
from modelmill.core.errors import ModelmillError
from modelmill.serve.replicas.cluster import Cluster
from modelmill.serve.replicas.front import Front, guarded
from modelmill.serve.server import Place, http_server, listen
from modelmill.serve.service import Service

LOOK = 0.5
"""Seconds between two looks at the replicas."""
GONE = 20
"""So many looks in vain, and Ray is given up."""
_log = log.get("serve")


class ReplicaServer:
    """Everything of one ``modelmill serve --ray``."""

    def __init__(self, cluster: Cluster, place: Place) -> None:
        self._cluster, self._place = cluster, place
        self._service = Service({}, place.limits)
        self._signals = 0
        self._asked = asyncio.Event()
        self._roll = asyncio.Event()

    async def run(self, opened: Callable[[str], None] = lambda _: None) -> None:
        """Serve until a signal. opened: told the address once the port is open.

        Raises UsageError where the port cannot be had, ModelmillError where no replica can be started.
        """
        sock = listen(self._place.host, self._place.port)
        server = http_server(guarded(Front(self._cluster, self._service), self._service))
        host, port = sock.getsockname()[:2]
        opened(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
        serving = asyncio.create_task(server.serve([sock]))
        watching = asyncio.create_task(self._watch())
        watching.add_done_callback(lambda _: self._asked.set())
        try:
            await self._asked.wait()
            await self._drain()
        finally:
            server.should_exit = True
            if self._signals > 1:
                server.force_exit = True
            await serving
            watching.cancel()
            (ended,) = await asyncio.gather(watching, return_exceptions=True)
            await asyncio.to_thread(self._cluster.stop)
            self._service.close()
        if isinstance(ended, Exception):
            raise ended

    async def _watch(self) -> None:
        """Start the replicas, then look after them. Raises ModelmillError where that is over."""
        self._listen()
        await asyncio.to_thread(self._cluster.start)
        # Ray sets handlers of its own when it starts
        self._listen()
        missed = 0
        while True:
            if self._roll.is_set():
                self._roll.clear()
                _log.info("replacing the replicas")
                await asyncio.to_thread(self._cluster.roll)
            try:
                await asyncio.to_thread(self._cluster.look)
                missed = 0
            except ModelmillError:
                raise
            except Exception as error:
                missed += 1
                _log.error("Ray does not answer", extra={"data": {"kind": type(error).__name__, "times": missed}})
                if missed >= GONE:
                    raise ModelmillError("Ray does not answer any more; start the server again") from None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._roll.wait(), LOOK)

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, partial(self._signalled))
        loop.add_signal_handler(signal.SIGHUP, self._roll.set)

    def _signalled(self) -> None:
        self._signals += 1
        self._asked.set()

    async def _drain(self) -> None:
        self._service.draining = True
        deadline = asyncio.get_running_loop().time() + (self._place.patience if self._signals else 0)
        _log.info("draining", extra={"data": {"requests": self._service.active, "seconds": self._place.patience}})
        while self._service.active and self._signals < 2 and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
