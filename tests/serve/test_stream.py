"""Streams: something is sent in time, also while a model writes what makes no events."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from modelmill.serve import stream
from modelmill.serve.stream import KEEPALIVE_COMMENT, EventFormatter, EventStream


class _Handle:
    """Gives these items, one after another; None: nothing comes for too long."""

    def __init__(self, items: list[str | None]) -> None:
        self._items = items

    async def fetch_items(self, _: float) -> list[str]:
        if not self._items:
            return []
        item = self._items.pop(0)
        if item is None:
            raise TimeoutError
        return [item]

    def close(self) -> None:
        """Nothing is left."""


class _Formatter(EventFormatter):
    """Sends the items as they are."""

    def first_events(self) -> bytes:
        return b""

    def delta_events(self, items: Any) -> bytes:
        return "".join(items).encode()

    def terminal_events(self) -> bytes:
        return b"end"


def sent(items: list[str | None]) -> list[bytes]:
    """What a client receives."""
    bodies: list[bytes] = []

    async def send(message: Any) -> None:
        bodies.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.Event().wait()

    handle: Any = _Handle(items)
    asyncio.run(EventStream(handle, _Formatter())({}, receive, send))
    return [body for body in bodies if body]


def test_a_connection_is_kept_alive_while_no_item_comes() -> None:
    assert sent(["a", None, "b"]) == [b"a", KEEPALIVE_COMMENT, b"b", b"end"]


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_a_connection_is_kept_alive_while_items_make_no_events(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A held call or thinking that is left out may be written for minutes."""
    monkeypatch.setattr(stream, "KEEPALIVE_SECONDS", seconds)
    alive = [] if seconds else [KEEPALIVE_COMMENT] * 2
    assert sent(["a", "", "", "b"]) == [b"a", *alive, b"b", b"end"]
