"""Routes that take a JSON body: read, parsed and validated without holding up the event loop.

FastAPI parses and validates on the loop. Here a body of more than a few KB goes to a thread, where it is parsed in
pieces (``json_body``), so that streams and /health go on meanwhile. The signature still says what a body is, for the
OpenAPI document.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, get_type_hints

from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from modelmill.serve.bounded import Shape
from modelmill.serve.complaint import complaint
from modelmill.serve.errors import invalid
from modelmill.serve.json_body import BodyError, parse
from modelmill.serve.json_scan import Bounds
from modelmill.serve.service import TENANT, Service, salted

AT_ONCE = 16 << 10
"""Bytes of a body that is parsed on the loop: a millisecond, whatever is in it."""
S = TypeVar("S", bound=Shape)


class BodyRoute(APIRoute):
    """Calls ``endpoint(body, request)``, which returns a Response."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Without FastAPI's own reading and validating."""
        model: type[Shape] = get_type_hints(self.endpoint)["body"]
        endpoint = self.endpoint

        async def handle(request: Request) -> Response:
            body = await taken(request, model)
            if "cache_salt" in model.model_fields:
                body.cache_salt = salted(request.scope.get(TENANT, ""), body.cache_salt)  # type: ignore[attr-defined]
            response: Response = await endpoint(body, request)
            return response

        return handle


async def taken(request: Request, model: type[S]) -> S:
    """The request's body as ``model``. Raises ApiError 400, ClientDisconnect."""
    data = bytearray()
    async for piece in request.stream():
        data += piece
    if not data:
        raise invalid("the request's body is empty; send an object")
    if not _is_json(request.headers.get("content-type", "")):
        # a form: what curl says it sends, and what a page of another origin may send unasked
        raise invalid("the request's body has to be told to be JSON: add the header content-type: application/json")
    service: Service = request.app.state.service
    if len(data) <= AT_ONCE:
        return validated(_loaded(data), model)
    return await service.beside(_made, data, model, service.json_bounds)


def _is_json(declared: str) -> bool:
    kind = declared.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _loaded(data: bytearray) -> Any:
    """A small body. Raises ApiError."""
    try:
        return json.loads(str(data, "utf-8-sig", "surrogatepass"))  # JSON is UTF-8 (RFC 8259), however long it is
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise invalid("the request's body is not JSON") from None
    except (ValueError, RecursionError):
        raise invalid("the request's body cannot be read as JSON") from None


def _made(data: bytearray, model: type[S], bounds: Bounds) -> S:
    """A large body, whose bytes are given up. Raises ApiError."""
    try:
        raw = parse(data, bounds)
    except BodyError as error:
        field = error.field if error.field in model.model_fields else None
        named = f"{field}:" if field else "the request's body"
        raise invalid(f"{named} {error}", field) from None
    data.clear()
    return validated(raw, model)


def validated(raw: Any, model: type[S]) -> S:
    """JSON data as ``model``. Raises ApiError 400 that names the field at fault."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
    param, line = complaint(found, model)
    raise invalid(line, param)
