"""Stores the responses of /v1/responses, and looks up those that a request continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request

from modelmill.core.errors import RequestError
from modelmill.serve.discriminated_unions import parse_object
from modelmill.serve.response_store import (
    estimate_stored_bytes,
    input_as_items,
    make_stored_response,
)
from modelmill.serve.responses_schema import ItemReference, ResponsesRequest
from modelmill.serve.routes.common import get_service
from modelmill.serve.service import OWNER_SCOPE_KEY, Service


def request_owner(request: Request) -> str:
    """Who made a request: responses of others are not found."""
    return str(request.scope.get(OWNER_SCOPE_KEY, ""))


def should_store_response(service: Service, body: ResponsesRequest) -> bool:
    """Whether the response is stored: unless the client says no, or the server has no room."""
    return body.store is not False and service.response_store.max_bytes > 0


def previous_response_items(request: Request, id: str | None) -> list[Any]:
    """The items of a response and of those before it; none for None.

    Raises:
        ApiError: 400, the response is not stored.
        RequestError: the server stores none.
    """
    if id is None:
        return []
    store = get_service(request).response_store
    if not store.max_bytes:
        raise RequestError(
            "previous_response_id is not supported: responses are not stored; send the earlier "
            "items in input"
        )
    return store.get(request_owner(request), id, "previous_response_id").items


def resolve_item_references(request: Request, items: Sequence[Any]) -> list[Any]:
    """The items, each ``item_reference`` replaced by the stored item.

    Vercel's AI SDK refers to the model's items unless the client says store: false.

    Raises:
        ApiError: 400, an item is not stored.
        RequestError: a reference has no id, or other keys.
    """
    store, owner = get_service(request).response_store, request_owner(request)
    resolved = []
    for index, item in enumerate(items):
        field = f"input[{index}]"
        if _is_item_reference(item):
            item = store.get_item(owner, parse_object(item, field, ItemReference).id, field)
        resolved.append(item)
    return resolved


def _is_item_reference(item: Any) -> bool:
    return isinstance(item, Mapping) and (
        item.get("type") == "item_reference"
        or (item.get("type") is None and item.keys() <= {"id", "type"} and "id" in item)
    )


class ResponseRecorder:
    """Stores the response of one request."""

    def __init__(self, service: Service, request: Request, body_input: str | Sequence[Any]) -> None:
        self._store, self._owner = service.response_store, request_owner(request)
        self._items = input_as_items(body_input)

    def store_response(self, response: Mapping[str, Any]) -> None:
        """Store the response; may be called from any thread."""
        stored = make_stored_response(self._items, response)
        self._store.add(self._owner, stored, estimate_stored_bytes(stored))
