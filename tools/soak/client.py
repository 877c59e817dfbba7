"""Requests over plain sockets, since a client library would correct malformed ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tools.soak.server import SoakServer


@asynccontextmanager
async def connect(
    server: SoakServer,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection; it is always closed at the end of the block."""
    reader, writer = await asyncio.open_connection(server.host, server.port, limit=1 << 24)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def post(path: str, data: bytes) -> bytes:
    """Encode a request with ``connection: close``."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: "
        "application/json\r\n"
    )
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


async def send_request(
    server: SoakServer, path: str, body: Any, seconds: float = 120
) -> tuple[int, bytes]:
    """Send a request and read the response.

    Args:
        server: to send to.
        path: of the request.
        body: bytes are sent unchanged, anything else as JSON.
        seconds: timeout.

    Returns:
        The status and everything after the header.
    """
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with asyncio.timeout(seconds), connect(server) as (reader, writer):
        writer.write(post(path, data))
        header, _, rest = (await reader.read(-1)).partition(b"\r\n\r\n")
    status_line = header.split(None, 2)
    return (int(status_line[1]) if len(status_line) > 1 else 0), rest


async def disconnect_mid_stream(
    server: SoakServer, path: str, body: Any, num_chunks: int, reset: bool = False
) -> int:
    """Begin a stream, read ``num_chunks`` chunks and disconnect; return the bytes read.

    With ``reset`` the connection is closed by a TCP reset.
    """
    num_bytes = 0
    async with connect(server) as (reader, writer):
        writer.write(post(path, json.dumps(body).encode()))
        for _ in range(num_chunks):
            chunk = await reader.read(4096)
            num_bytes += len(chunk)
            if not chunk:
                break
        if reset:
            linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
    return num_bytes
