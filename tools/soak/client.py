"""Requests over plain sockets, so that nothing of a client library tidies up what is to be
rough.
"""

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
    """A connection, closed however the block is left."""
    reader, writer = await asyncio.open_connection(server.host, server.port, limit=1 << 24)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def post(path: str, data: bytes) -> bytes:
    """The bytes of a request that asks for the connection's end."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: "
        "application/json\r\n"
    )
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


async def send_request(
    server: SoakServer, path: str, body: Any, seconds: float = 120
) -> tuple[int, bytes]:
    """(status, everything after the header). body: bytes as they are, anything else as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with asyncio.timeout(seconds), connect(server) as (reader, writer):
        writer.write(post(path, data))
        head, _, rest = (await reader.read(-1)).partition(b"\r\n\r\n")
    words = head.split(None, 2)
    return (int(words[1]) if len(words) > 1 else 0), rest


async def disconnect_mid_stream(
    server: SoakServer, path: str, body: Any, num_chunks: int, reset: bool = False
) -> int:
    """Begin a stream, read so many pieces of it and go away, with a reset where ``reset``; bytes
    that came.
    """
    got = 0
    async with connect(server) as (reader, writer):
        writer.write(post(path, json.dumps(body).encode()))
        for _ in range(num_chunks):
            part = await reader.read(4096)
            got += len(part)
            if not part:
                break
        if reset:
            linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
    return got
