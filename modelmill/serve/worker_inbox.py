"""The worker's end of the socket, and the messages that have arrived on it."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from modelmill.core.errors import ModelmillError, RequestError
from modelmill.core.types import Guide, Request
from modelmill.serve.kv_session_worker import LoadedKvSession
from modelmill.serve.worker_messages import (
    LENGTH_PREFIX,
    AbortRequest,
    AddRequest,
    Heartbeat,
    Message,
    Ping,
    decode_frame_body,
    encode_frame,
)

SEND_BUFFER_BYTES = 4 << 20


class MessageChannel:
    """The worker's end of the socket: blocking; one thread reads, any thread may send.

    Messages of several threads are never interleaved.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._sock = sock
        self._file = sock.makefile("rb", buffering=1 << 16)
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message.

        Blocks while the server does not read, so the engine cannot run far ahead of it.
        """
        data = encode_frame(message)
        with self._lock:
            self._sock.sendall(data)

    def receive(self) -> Message | None:
        """Return the next message; None when the server is gone."""
        try:
            prefix = self._file.read(LENGTH_PREFIX.size)
            body = (
                self._file.read(LENGTH_PREFIX.unpack(prefix)[0])
                if len(prefix) == LENGTH_PREFIX.size
                else b""
            )
        except (OSError, ValueError):
            return None
        return decode_frame_body(body) if body else None


class HeartbeatSender:
    """Sends a Heartbeat at intervals during a long step, which would look like a hang otherwise."""

    def __init__(self, send: Callable[[Message], None], interval: float) -> None:
        """Remember where to send.

        Args:
            send: sends a message.
            interval: seconds between two heartbeats.
        """
        self._send = send
        self._interval = interval
        self._last = time.monotonic()

    def __call__(self) -> None:
        """Called after each op: send a Heartbeat if it is due."""
        now = time.monotonic()
        if now - self._last >= self._interval:
            self._last = now
            with contextlib.suppress(OSError):  # the reader thread notices a lost server
                self._send(Heartbeat())


@dataclass(frozen=True)
class ReceivedRequest:
    """A received request, its guide and its time of arrival (time.perf_counter).

    Attributes:
        request: as received.
        arrived_at: seconds.
        guide: of its grammar; None without one.
        error: one line saying why the grammar cannot be compiled; empty if it can.
    """

    request: Request
    arrived_at: float
    guide: Guide | None = None
    error: str = ""


class WorkerInbox:
    """Reads the channel on its own thread, which notices a lost server while the engine is busy.

    Grammars are compiled on another thread, so that they delay no step. While the engine is being
    opened, the reader thread answers a Ping; after ``stop_answering_pings`` the engine's thread
    does, but for ``answering_pings``.
    """

    def __init__(
        self, channel: MessageChannel, on_server_gone: Callable[[], None], is_opening: bool = False
    ) -> None:
        """Start the reader thread.

        Args:
            channel: to read from.
            on_server_gone: called once the server is gone; ``messages`` then ends with None.
            is_opening: the engine is still being opened.
        """
        self.messages: queue.SimpleQueue[Message | ReceivedRequest | LoadedKvSession | None] = (
            queue.SimpleQueue()
        )
        self._make_guide: Callable[[Request], Guide] | None = None
        self._answers_pings = is_opening
        self._channel, self._on_server_gone = channel, on_server_gone
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="modelmill-grammar")
        self._pending: set[str] = set()
        self._lock = threading.Lock()
        threading.Thread(
            target=self._read_messages, name="modelmill-worker-in", daemon=True
        ).start()

    def set_guide_factory(self, make_guide: Callable[[Request], Guide]) -> None:
        """Make guides with ``make_guide`` from now on; without it, grammars are refused."""
        self._make_guide = make_guide

    def stop_answering_pings(self) -> None:
        """The engine is open: its thread answers a Ping from now on."""
        self._answers_pings = False

    @contextlib.contextmanager
    def answering_pings(self) -> Iterator[None]:
        """Inside, the reader thread answers a Ping: memory of any size is being moved."""
        self._answers_pings = True
        # also for a Ping that waits behind what is being done
        self._channel.send(Heartbeat())
        try:
            yield
        finally:
            self._answers_pings = False

    def _read_messages(self) -> None:
        while (message := self._channel.receive()) is not None:
            if isinstance(message, AddRequest):
                arrival = ReceivedRequest(message.request, time.perf_counter())
                if message.request.grammar is None:
                    self.messages.put(arrival)
                else:
                    self._pending.add(message.request.id)
                    self._pool.submit(self._compile_guide, arrival)
                continue
            if isinstance(message, Ping) and self._answers_pings:
                with contextlib.suppress(OSError):
                    self._channel.send(Heartbeat())
                continue
            with self._lock:
                if isinstance(message, AbortRequest):
                    self._pending.discard(message.id)
                self.messages.put(message)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._on_server_gone()
        self.messages.put(None)

    def _compile_guide(self, arrival: ReceivedRequest) -> None:
        request = arrival.request
        if request.id not in self._pending:
            return
        guide, message = None, ""
        try:
            if self._make_guide is None:
                raise RequestError("this engine was opened without structured output")
            guide = self._make_guide(request)
        except ModelmillError as error:
            message = str(error)
        except Exception as error:
            # an exception would be lost in this thread and the request would wait forever
            message = f"its grammar cannot be made ready: {type(error).__name__}"
        with self._lock:
            # an abort may have removed it meanwhile
            if request.id in self._pending:
                self._pending.discard(request.id)
                self.messages.put(replace(arrival, guide=guide, error=message))
