"""The HTTP application: routes, and errors in OpenAI's form."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

from modelmill import __version__
from modelmill.core import log
from modelmill.core.errors import ModelmillError
from modelmill.core.quote import one_line
from modelmill.serve import errors
from modelmill.serve.complaint import complaint
from modelmill.serve.described import describe
from modelmill.serve.embeddings import EmbeddingRequest
from modelmill.serve.errors import ApiError, invalid
from modelmill.serve.gate import Gate
from modelmill.serve.responses import ResponsesRequest
from modelmill.serve.routes import chat, completions, embeddings, health, page, responses, segment, tokenize
from modelmill.serve.schema import ChatRequest, CompletionRequest, DetokenizeRequest, Refusal, Shape, TokenizeRequest
from modelmill.serve.segment_schema import SegmentRequest
from modelmill.serve.service import Service
from modelmill.serve.shape import Json

BODIES: dict[str, type[Shape]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/segment": SegmentRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
"""What each path is asked: an error names a field of it."""
REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": Refusal, "description": "The request is at fault; the message says how"},
    401: {"model": Refusal, "description": "The key is missing or wrong"},
    403: {"model": Refusal, "description": "A server without a key answers to localhost only"},
    404: {"model": Refusal, "description": "No such model"},
    405: {"model": Refusal, "description": "The path takes another method"},
    408: {"model": Refusal, "description": "The body did not come in time"},
    413: {"model": Refusal, "description": "The body is too large"},
    429: {"model": Refusal, "description": "Too many requests wait"},
    500: {"model": Refusal, "description": "A bug"},
    503: {"model": Refusal, "description": "The engine is loading, restarting or being shut down"},
}
_log = log.get("serve")


def make_app(service: Service) -> ASGIApp:
    """The application of a service; the gate stands before it."""
    app = FastAPI(title="modelmill", version=__version__, docs_url=None, redoc_url=None, responses=REFUSALS)
    app.state.service = service
    for module in (health, completions, chat, responses, embeddings, tokenize, segment, page):
        app.include_router(module.router)
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(ModelmillError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _refused)
    app.openapi = lambda: _described(app)  # type: ignore[method-assign]
    guarded: ASGIApp = Gate(_Unraised(app), service)
    if service.limits.origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=service.limits.origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    return guarded


def _described(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document: validation is answered with 400 here, never with 422."""
    if app.openapi_schema is None:
        app.openapi_schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for path in app.openapi_schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        describe(app.openapi_schema)
        for left in ("HTTPValidationError", "ValidationError"):
            app.openapi_schema.get("components", {}).get("schemas", {}).pop(left, None)
    return app.openapi_schema


class _Unraised:
    """Starlette answers a bug with our 500 and raises it again; it is logged here and goes no further."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self._app(scope, receive, send)
        except ApiError:
            raise
        except Exception:
            _log.exception("bug", extra={"data": {"request_id": scope.get("modelmill.request_id")}})


async def _refused(request: Request, error: Exception) -> Response:
    body = BODIES.get(request.url.path)
    told = errors.of(error, frozenset() if body is None else frozenset(body.model_fields))
    if told.status == 500 and isinstance(error, ModelmillError):
        # it says what this machine or this engine lacks, and nothing of the request; a bug is logged by _Unraised
        data = {"request_id": request.scope.get("modelmill.request_id"), "error": type(error).__name__}
        _log.error("cannot", extra={"data": {**data, "why": one_line(str(error), errors.SAID)}})
    return answer(told)


async def _gone(_: Request, __: Exception) -> Response:
    # nobody reads it; 499 is what others write into their logs for it
    return Response(status_code=499)


async def _http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    told = {404: "there is nothing at this path", 405: "this path takes another method"}.get(error.status_code)
    return answer(ApiError(error.status_code, told or "refused", code=code, headers=error.headers))


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    param, line = complaint(error.errors(), BODIES.get(request.url.path))
    return answer(invalid(line, param))


def answer(error: ApiError) -> Response:
    """An error as a response."""
    return Json(error.body(), error.status, error.headers)
