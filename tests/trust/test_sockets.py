"""What can be done to a server with nothing but a socket."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import psutil
import pytest

from modelmill.serve import http_protocol, stream
from modelmill.serve.app import make_app
from modelmill.serve.server import make_http_server, open_listening_socket
from modelmill.serve.service import Service, ServiceLimits
from tests.serve.server_process import read_all
from tests.serve.service_thread import ServiceThread
from tests.trust.test_serving import COMPLETION, given_up, idle
from tests.wait import TIMEOUT_SECONDS, wait_until

LONG = {**COMPLETION, "max_tokens": 450, "ignore_eos": True, "stream": True}


def fits(data: bytes) -> bool:
    """Whether a socket's buffers take it whole."""
    return len(data) < 1 << 14


class Port:
    """A listening server on the running service's event loop."""

    def __init__(self, running: ServiceThread, limits: ServiceLimits) -> None:
        self.running = running
        self.service = Service(running.service.engines, limits)
        sock = open_listening_socket("127.0.0.1", 0)
        self.address = sock.getsockname()

        async def start() -> None:
            self.server = make_http_server(make_app(self.service))
            self.task = asyncio.create_task(self.server.serve([sock]))
            while not self.server.started:
                await asyncio.sleep(0.001)

        running.run(start())

    def close(self) -> None:
        async def stop() -> None:
            self.server.should_exit = True
            await self.task

        self.running.run(stop())
        self.service.close()

    def send(self, data: bytes) -> socket.socket:
        """A connection whose data is there when the server first looks, unless it fits no buffer:
        then it may have answered and closed before all was sent."""
        with self.block_server() if fits(data) else nullcontext():
            sock = socket.create_connection(self.address, timeout=TIMEOUT_SECONDS)
            try:
                sock.sendall(data)
            except ConnectionError:
                if fits(data):
                    raise
        return sock

    @contextmanager
    def block_server(self) -> Iterator[None]:
        """The server does nothing meanwhile: it is impatient, and a client may be kept from
        sending.
        """
        there, go_on = threading.Event(), threading.Event()

        def wait() -> None:
            there.set()
            go_on.wait(TIMEOUT_SECONDS)

        self.running.loop.call_soon_threadsafe(wait)
        there.wait(TIMEOUT_SECONDS)
        try:
            yield
        finally:
            go_on.set()

    def answer(self, data: bytes) -> bytes:
        """All that comes until the server closes."""
        with self.send(data) as sock:
            try:
                return read_all(sock)
            except ConnectionError:
                return b"reset"


@pytest.fixture
def port(running: ServiceThread, monkeypatch: pytest.MonkeyPatch) -> Iterator[Port]:
    """Impatient, so that the tests need not wait."""
    monkeypatch.setattr(http_protocol, "HEADER_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(stream, "SEND_TIMEOUT", 0.3)
    slow_port = Port(running, ServiceLimits(body_timeout=0.3))
    yield slow_port
    idle(running)
    assert running.post("/v1/completions", COMPLETION).status == 200
    wait_until(lambda: slow_port.service.num_active == 0)
    slow_port.close()


def post(body: Any, *headers: str, path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *headers]
    return "\r\n".join([*lines, f"content-length: {len(data)}", "", ""]).encode() + data


def error_of(answer: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error of an answer that closes the connection."""
    head, body = answer.split(b"\r\n\r\n", 1)
    assert b"connection: close" in head.lower()
    assert b"application/json" in head
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return int(head.split()[1]), error


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 20000, 431),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 10**6, 431),
        (b"GET /" + b"z" * 10**6, 431),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 33000 + b"\r\n\r\n", 431),
        (b"GET /health?" + b"z" * 33000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), 400),
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: lo", 408),
        (
            b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\ntransfer-encoding: "
            b"chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
        (
            b"POST /tokenize HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ncontent-length: "
            b"0\r\n\r\n0\r\n\r\n",
            400,
        ),
        (b"GET /version HTTP/1.1\r\nhost: localhost:80@evil.com\r\n\r\n", 400),
    ],
    ids=range(15),
)
def test_headers_without_end_or_sense(port: Port, data: bytes, status: int) -> None:
    answer = port.answer(data)
    # a server that closes while more is coming may look like a reset
    if answer != b"reset" or fits(data):
        assert error_of(answer)[0] == status


def test_a_connection_that_says_nothing_is_closed(port: Port) -> None:
    assert port.answer(b"") == b""


def test_a_body_that_never_comes(port: Port) -> None:
    request_bytes = post(COMPLETION)
    status, error = error_of(port.answer(request_bytes[:-5]))
    assert (status, error["code"]) == (408, "request_timeout")


def test_a_connection_serves_many_requests_and_pauses_between_them(port: Port) -> None:
    sock = port.send(post(COMPLETION))
    for _ in range(3):
        answer = b""
        while not answer.endswith(b"}}}"):  # the counts, which stand last
            part = sock.recv(1 << 16)
            assert part, answer
            answer += part
        assert answer.startswith(b"HTTP/1.1 200"), answer
        time.sleep(0.4)
        sock.sendall(post(COMPLETION))
    sock.close()


def test_a_client_that_reads_nothing_is_dropped_and_others_go_on(port: Port) -> None:
    """Its answer fits no buffer: the server gives it up after a while; meanwhile everyone else is
    served.
    """
    fat = {**LONG, "n": 16, "logprobs": 20, "temperature": 1}
    socks = []
    for _ in range(3):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(port.address)
        sock.sendall(post(fat))
        socks.append(sock)
    assert b" 200 " in port.answer(post(COMPLETION, "connection: close"))
    idle(port.running)
    wait_until(lambda: port.service.num_active == 0)
    for sock in socks:
        sock.close()


def test_clients_that_go_away_in_the_middle(port: Port) -> None:
    """Two hundred on real sockets: half are closed, half reset."""
    with given_up(port.running, max_tokens=450 * 300):
        # few at once: what a server that is away leaves to be computed without a client
        for begin in range(0, 200, 20):
            socks = [
                port.send(post({**LONG, "n": 1 + place % 2})) for place in range(begin, begin + 20)
            ]
            for place, sock in enumerate(socks):
                if place % 3:
                    sock.recv(1 << (place % 10))
                if place % 2:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                sock.close()


def test_requests_in_one_packet_are_answered_in_order(port: Port) -> None:
    """Pipelined requests are no way to smuggle one past the gate."""
    short = post({**COMPLETION, "max_tokens": 1})
    with port.send(short * 4 + post(COMPLETION, "connection: close", path="/nothing")) as sock:
        received = read_all(sock)
    assert [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", received)] == [
        200,
        200,
        200,
        200,
        404,
    ]


def test_only_the_port_of_the_api_listens(port: Port) -> None:
    """Neither the server nor its worker opens another one."""
    me = psutil.Process()
    # the server that other tests share is a process of its own
    workers = [each for each in me.children() if "modelmill.serve.worker" in each.cmdline()]
    assert workers
    ports = {
        connection.laddr.port
        for process in (me, *workers)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert ports == {port.address[1]}
