"""Responses that the next request continues by their id (previous_response_id).

They are kept in memory only, the least recently used are dropped, and each belongs to the key that
made it. A server that was restarted has none, and neither has another replica.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelmill.serve.errors import ApiError

DEFAULT_STORE_BYTES = 256 << 20
BYTES_PER_STORED_VALUE = 64
"""Memory of a value of JSON beside its characters, of up to four bytes each."""


@dataclass(frozen=True)
class StoredResponse:
    """A response and the conversation that it ended.

    Attributes:
        items: of the input, those of earlier responses included, and of the output.
        input_length: how many of them are input.
        response: as it was returned.
    """

    items: list[Any]
    input_length: int
    response: Mapping[str, Any]


class ResponseStore:
    """Responses by owner and id, up to a number of bytes. Thread-safe."""

    def __init__(self, max_bytes: int = DEFAULT_STORE_BYTES) -> None:
        """Start empty; max_bytes: 0 stores nothing."""
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[str, str], tuple[StoredResponse, int]] = OrderedDict()
        self._items: dict[tuple[str, str], tuple[str, Mapping[str, Any]]] = {}
        """Items of the outputs by owner and id, with the id of their response."""

    def add(self, owner: str, stored: StoredResponse, size: int) -> None:
        """Add a response of ``size`` bytes; one that is larger than the store is dropped."""
        if size > self.max_bytes:
            return
        with self._lock:
            response_id = str(stored.response["id"])
            self._entries[owner, response_id] = stored, size
            for item in _output_items_with_ids(stored):
                self._items[owner, str(item["id"])] = response_id, item
            self.used_bytes += size
            while self.used_bytes > self.max_bytes:
                (dropped_owner, _), (dropped, dropped_size) = self._entries.popitem(last=False)
                self._remove_items_and_bytes(dropped_owner, dropped, dropped_size)

    def get(self, owner: str, id: str, field: str | None = None) -> StoredResponse:
        """Return a response.

        Args:
            owner: of the request.
            id: of the response.
            field: of the request that names it, for the error.

        Raises:
            ApiError: there is none, or it was dropped; 404, or 400 for a field, as OpenAI does.
        """
        with self._lock:
            entry = self._entries.get((owner, id))
            if entry is not None:
                self._entries.move_to_end((owner, id))
        if entry is None:
            raise ApiError(
                400 if field else 404,
                f"there is no response {id[:80]!r}: it was not stored, or dropped to make room; "
                "send the earlier items in input",
                param=field,
                code="previous_response_not_found" if field else "not_found",
            )
        return entry[0]

    def get_item(self, owner: str, id: str, field: str) -> Mapping[str, Any]:
        """Return an item of the output of a stored response.

        Args:
            owner: of the request.
            id: of the item.
            field: of the request that names it, for the error.

        Raises:
            ApiError: 400, there is none, or its response was dropped.
        """
        found = self._items.get((owner, id))
        if found is None:
            raise ApiError(
                400,
                f"{field}: there is no item {id[:80]!r}: its response was not stored, or dropped "
                "to make room; send the item itself",
                param="input",
                code="not_found",
            )
        response_id, item = found
        self.get(owner, response_id, field)  # it was used now
        return item

    def delete(self, owner: str, id: str) -> None:
        """Forget a response; raises ApiError as ``get`` does."""
        self.get(owner, id)
        with self._lock:
            entry = self._entries.pop((owner, id), None)
            if entry is not None:
                self._remove_items_and_bytes(owner, *entry)

    def _remove_items_and_bytes(self, owner: str, stored: StoredResponse, size: int) -> None:
        """Count a response as gone; the caller holds the lock."""
        self.used_bytes -= size
        for item in _output_items_with_ids(stored):
            self._items.pop((owner, str(item["id"])), None)


def _output_items_with_ids(stored: StoredResponse) -> list[Mapping[str, Any]]:
    return [item for item in stored.response["output"] if item.get("id")]


def make_stored_response(input_items: Sequence[Any], response: Mapping[str, Any]) -> StoredResponse:
    """The conversation after a response; log-probabilities are not kept."""
    output = [_without_logprobs(item) for item in response["output"]]
    return StoredResponse([*input_items, *output], len(input_items), {**response, "output": output})


def estimate_stored_bytes(stored: StoredResponse) -> int:
    """About how much memory a stored response takes."""
    size = 0
    remaining: list[Any] = [stored.items, dict(stored.response)]
    while remaining:
        value = remaining.pop()
        if isinstance(value, Mapping):
            remaining += (*value.keys(), *value.values())
        elif isinstance(value, list):
            remaining += value
        size += BYTES_PER_STORED_VALUE + (4 * len(value) if isinstance(value, str) else 0)
    return size


def input_as_items(body_input: str | Sequence[Any]) -> list[Any]:
    """The input of a request as items."""
    if isinstance(body_input, str):
        return [{"type": "message", "role": "user", "content": body_input}]
    return list(body_input)


def _without_logprobs(item: Mapping[str, Any]) -> dict[str, Any]:
    content = item.get("content")
    if not isinstance(content, list):
        return dict(item)
    parts = [
        {**part, "logprobs": []} if isinstance(part, Mapping) and part.get("logprobs") else part
        for part in content
    ]
    return {**item, "content": parts}
