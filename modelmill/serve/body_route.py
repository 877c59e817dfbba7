"""Routes that take a JSON body: read, parsed and validated without holding up the event loop.

FastAPI parses and validates on the loop. Here a body of more than a few KB goes to a thread, where
it is parsed in pieces (``gil_yielding_json_parser``), so that streams and /health go on meanwhile.
The signature still says what a body is, for the OpenAPI document.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast, get_type_hints

from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from modelmill.serve.dialects.error_format import OLLAMA_PREFIX
from modelmill.serve.errors import invalid_request
from modelmill.serve.gil_yielding_json_parser import JsonParseError, parse_json
from modelmill.serve.json_scan import JsonLimits
from modelmill.serve.service import (
    PRIORITY_SCOPE_KEY,
    REQUEST_FIELDS_SET_SCOPE_KEY,
    TENANT_SCOPE_KEY,
    Service,
    tenant_cache_salt,
)
from modelmill.serve.stream import run_while_connected
from modelmill.serve.strict_models import StrictModel
from modelmill.serve.validation_errors import summarize_errors

MAX_INLINE_PARSE_BYTES = 16 << 10
"""Bytes of a body that is parsed on the loop: a millisecond, whatever is in it."""
S = TypeVar("S", bound=StrictModel)


class BodyRoute(APIRoute):
    """Calls ``endpoint(body, request)``, which returns a Response."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return a handler that replaces FastAPI's reading and validation of bodies."""
        model: type[StrictModel] = get_type_hints(self.endpoint)["body"]
        endpoint = self.endpoint

        async def handle(request: Request) -> Response:
            return await call_endpoint(endpoint, await read_validated_body(request, model), request)

        return handle


async def call_endpoint(
    endpoint: Callable[..., Any], body: StrictModel, request: Request
) -> Response:
    """Call ``endpoint(body, request)`` with what every route gives a valid body.

    These are the key's salt of the cache, the only model, and its priority for the queue.
    """
    model = type(body)
    request.scope[REQUEST_FIELDS_SET_SCOPE_KEY] = frozenset(body.model_fields_set)
    if "cache_salt" in model.model_fields:
        tenant = request.scope.get(TENANT_SCOPE_KEY, "")
        salt = tenant_cache_salt(tenant, cast(Any, body).cache_salt)
        body = body.model_copy(update={"cache_salt": salt})
    if model.may_omit_model and not cast(Any, body).model:
        name = request.app.state.service.only_model_name()
        body = body.model_copy(update={"model": name})
    if "priority" in model.model_fields:
        request.scope[PRIORITY_SCOPE_KEY] = cast(Any, body).priority
    response: Response = await endpoint(body, request)
    return response


async def read_validated_body(request: Request, model: type[S]) -> S:
    """Read and validate the body of a request.

    Raises:
        ApiError: 400, the body is invalid.
        ClientDisconnect: the client has disconnected.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise invalid_request(
            f"the request's body is compressed ({encoding[:20]}), which is not supported; send it "
            "without content-encoding"
        )
    data = bytearray()
    async for piece in request.stream():
        data += piece
    if not data:
        raise invalid_request("the request's body is empty; send an object")
    if not _is_json(request.headers.get("content-type", "")) and not _may_omit_content_type(
        request
    ):
        # form types: curl's default, and allowed from pages of other origins without CORS
        raise invalid_request(
            "the request's content type is not JSON: add the header content-type: application/json"
        )
    service: Service = request.app.state.service
    if len(data) <= MAX_INLINE_PARSE_BYTES:
        return validate_body(_parse_small_body(data), model)
    work = service.parse_in_thread(
        _parse_and_validate_large_body, data, model, service.json_limits(bool(model.unused))
    )
    return await run_while_connected(request.receive, work)


def _may_omit_content_type(request: Request) -> bool:
    """Whether a body without a JSON type is read: Ollama's clients and examples send none.

    Not from browsers, which would send it from pages of other origins; they name the origin.
    """
    is_browser = any(name in request.headers for name in ("origin", "sec-fetch-site"))
    return request.url.path.startswith(OLLAMA_PREFIX) and not is_browser


def _is_json(content_type: str) -> bool:
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == "application/json" or (
        media_type.startswith("application/") and media_type.endswith("+json")
    )


def _parse_small_body(data: bytearray) -> Any:
    """Parse a small body.

    Raises:
        ApiError: 400, it is not valid JSON.
    """
    try:
        # JSON is always UTF-8 (RFC 8259)
        return json.loads(str(data, "utf-8-sig", "surrogatepass"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise invalid_request("the request's body is not JSON") from None
    except (ValueError, RecursionError):
        raise invalid_request("the request's body cannot be read as JSON") from None


def _parse_and_validate_large_body(data: bytearray, model: type[S], limits: JsonLimits) -> S:
    """Parse and validate a large body; ``data`` is cleared to free its memory.

    Raises:
        ApiError: 400, it is invalid.
    """
    try:
        raw = parse_json(data, limits, model.unused)
    except JsonParseError as error:
        field = error.field if error.field in model.model_fields else None
        subject = f"{field}:" if field else "the request's body"
        raise invalid_request(f"{subject} {error}", field) from None
    data.clear()
    return validate_body(raw, model)


def validate_body(raw: Any, model: type[S]) -> S:
    """Validate JSON data.

    Raises:
        ApiError: 400; the message names the invalid field.
    """
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
    param, line = summarize_errors(errors, model)
    raise invalid_request(line, param)
