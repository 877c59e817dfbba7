"""GET and DELETE /v1/responses/{id}, and the items of its input."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from modelmill.serve.response_input_items import Order, list_input_items
from modelmill.serve.response_recorder import request_owner
from modelmill.serve.routes.common import get_service

bodyless_router = APIRouter()
"""Routes without a body."""


@bodyless_router.get("/v1/responses/{response_id}")
async def retrieve(request: Request, response_id: str) -> dict[str, Any]:
    """A stored response."""
    store = get_service(request).response_store
    return dict(store.get(request_owner(request), response_id).response)


@bodyless_router.get("/v1/responses/{response_id}/input_items")
async def retrieve_input(
    request: Request,
    response_id: str,
    order: Order = "desc",
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: str | None = None,
) -> dict[str, Any]:
    """The input of a stored response, the newest item first."""
    stored = get_service(request).response_store.get(request_owner(request), response_id)
    return list_input_items(stored, order, limit, after)


@bodyless_router.delete("/v1/responses/{response_id}")
async def delete(request: Request, response_id: str) -> dict[str, Any]:
    """Forget a stored response."""
    get_service(request).response_store.delete(request_owner(request), response_id)
    return {"id": response_id, "object": "response", "deleted": True}
