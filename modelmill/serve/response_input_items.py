"""The input of a stored response as OpenAI lists it: pages of items with an id each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from modelmill.serve.errors import invalid_request
from modelmill.serve.response_store import StoredResponse

Order = Literal["asc", "desc"]


def list_input_items(
    stored: StoredResponse, order: Order, limit: int, after: str | None
) -> dict[str, Any]:
    """Return one page of the input.

    Args:
        stored: the response.
        order: asc: the oldest item first.
        limit: how many items at most.
        after: id of the last item of the page before.

    Raises:
        ApiError: 400, no item has the id ``after``.
    """
    suffix = str(stored.response["id"]).partition("_")[2]
    items = [
        fill_item_defaults(item, f"{suffix}_{index}")
        for index, item in enumerate(stored.items[: stored.input_length])
    ]
    if order == "desc":
        items.reverse()
    begin = 0
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise invalid_request(f"after: the input has no item {after[:80]!r}", "after")
        begin = len(ids) - ids[::-1].index(after)  # a client may have named two items alike
    page = items[begin : begin + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": begin + limit < len(items),
    }


def fill_item_defaults(item: Mapping[str, Any], suffix: str) -> dict[str, Any]:
    """Return an item with what a request may leave out: id, type, status, parts of its content."""
    kind = item.get("type") or "message"
    listed = {"status": "completed", **item, "type": kind}
    if not listed.get("id"):
        prefix = "msg" if kind == "message" else "item"
        listed["id"] = f"{prefix}_{suffix}"
    if kind == "message" and isinstance(listed.get("content"), str):
        written = listed.get("role") == "assistant"
        part: dict[str, Any] = {"type": "input_text", "text": listed["content"]}
        if written:
            part = {"type": "output_text", "text": listed["content"], "annotations": []}
        listed["content"] = [part]
    return listed
