"""GET and DELETE /v1/responses/{id}, and the items of its input."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request

from modelmill.serve.errors import invalid_request
from modelmill.serve.query_parameters import check_query_parameters
from modelmill.serve.response_input_items import Order, list_input_items
from modelmill.serve.response_store_access import request_owner
from modelmill.serve.routes.common import get_service

bodyless_router = APIRouter(dependencies=[Depends(check_query_parameters)])
"""Routes without a body."""


@bodyless_router.get("/v1/responses/{response_id}")
async def retrieve(
    request: Request, response_id: str, stream: bool = False, starting_after: int | None = None
) -> dict[str, Any]:
    """A stored response, whole: of its events only the last one is kept.

    As at OpenAI, where those of responses with ``background`` alone can be streamed again.
    """
    stored = get_service(request).response_store.get(request_owner(request), response_id)
    if stream or starting_after is not None:
        name = "stream" if stream else "starting_after"
        raise invalid_request(
            f"{name} is not supported: the events of a response are not kept; leave it out for the "
            "whole response",
            name,
        )
    return dict(stored.response)


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
