"""The HTTP application: routes, and errors in OpenAI's format."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

from modelmill import __version__
from modelmill.core import log
from modelmill.core.errors import ModelmillError
from modelmill.core.quoting import truncate_to_one_line
from modelmill.serve import errors
from modelmill.serve.chat_schema import ChatRequest
from modelmill.serve.completion_schema import CompletionRequest
from modelmill.serve.dialects.anthropic_models import ANTHROPIC_VERSION_HEADER
from modelmill.serve.dialects.anthropic_schema import CountTokensRequest, MessagesRequest
from modelmill.serve.dialects.error_format import error_body
from modelmill.serve.dialects.llama_cpp_schema import InfillRequest, LlamaCppCompletionRequest
from modelmill.serve.dialects.ollama_schema import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from modelmill.serve.embeddings_schema import EmbeddingRequest
from modelmill.serve.errors import ApiError, invalid_request
from modelmill.serve.kv_session_schema import RestoreSessionRequest, SaveSessionRequest
from modelmill.serve.middleware import RequestMiddleware
from modelmill.serve.model_admin_schema import LoadRequest, ModelRequest, PinRequest
from modelmill.serve.openai_format import SurrogateSafeJsonResponse
from modelmill.serve.openapi_models import add_response_schemas
from modelmill.serve.response_body_models import ErrorResponse
from modelmill.serve.responses_schema import CompactRequest, ResponsesRequest
from modelmill.serve.routes import (
    chat,
    compaction,
    completions,
    embeddings,
    health,
    invocations,
    kv_sessions,
    llama_cpp,
    messages,
    models,
    ollama,
    page,
    responses,
    saved_kv_sessions,
    scores,
    segment,
    stored_responses,
    tokenize,
)
from modelmill.serve.scoring_schema import RerankRequest, ScoreRequest
from modelmill.serve.segmentation_schema import SegmentRequest
from modelmill.serve.service import REQUEST_FIELDS_SET_SCOPE_KEY, Service
from modelmill.serve.strict_models import StrictModel
from modelmill.serve.tokenize_schema import ApplyTemplateRequest, DetokenizeRequest, TokenizeRequest
from modelmill.serve.validation_errors import summarize_errors

REQUEST_MODELS: dict[str, type[StrictModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/chat/completions/input_tokens": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/compact": CompactRequest,
    "/v1/responses/input_tokens": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/segment": SegmentRequest,
    "/v1/rerank": RerankRequest,
    "/v1/score": ScoreRequest,
    "/completion": LlamaCppCompletionRequest,
    "/infill": InfillRequest,
    "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest,
    "/api/embed": OllamaEmbedRequest,
    "/api/embeddings": OllamaEmbeddingsRequest,
    "/api/show": OllamaShowRequest,
    "/tokenize": TokenizeRequest,
    "/apply-template": ApplyTemplateRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/models/load": LoadRequest,
    "/v1/models/unload": ModelRequest,
    "/v1/sessions/save": SaveSessionRequest,
    "/v1/sessions/restore": RestoreSessionRequest,
    "/v1/models/pin": PinRequest,
    "/v1/models/reload": ModelRequest,
}
"""The request model of each path; error messages name a field of it."""
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorResponse, "description": "The request is invalid; the message says why"},
    401: {"model": ErrorResponse, "description": "The key is missing or wrong"},
    403: {
        "model": ErrorResponse,
        "description": "A server without a key answers to localhost only; or no admin key",
    },
    404: {"model": ErrorResponse, "description": "No such model"},
    405: {"model": ErrorResponse, "description": "The path takes another method"},
    409: {"model": ErrorResponse, "description": "The model's state does not allow it"},
    408: {"model": ErrorResponse, "description": "The body did not arrive in time"},
    413: {"model": ErrorResponse, "description": "The body is too large"},
    429: {"model": ErrorResponse, "description": "Too many requests wait"},
    500: {"model": ErrorResponse, "description": "Internal error"},
    503: {
        "model": ErrorResponse,
        "description": "The engine is loading, restarting or being shut down",
    },
}
_log = log.get_logger("serve")


def make_app(service: Service) -> ASGIApp:
    """The application of a service, behind ``RequestMiddleware``."""
    app = FastAPI(
        title="modelmill", version=__version__, openapi_url=None, responses=ERROR_RESPONSES
    )
    app.state.service = service
    modules = (
        llama_cpp,
        scores,
        models,
        kv_sessions,
        health, completions, chat, responses, compaction, messages, ollama, embeddings, tokenize,
        segment, page, invocations,
    )  # fmt: skip
    for module in modules:
        app.include_router(module.router)
    for more in (
        stored_responses.bodyless_router,
        saved_kv_sessions.router, ollama.bodyless_router,
    ):  # fmt: skip
        app.include_router(more)
    app.add_route("/openapi.json", _handle_openapi_request, include_in_schema=False)
    app.add_exception_handler(ApiError, _handle_error)
    app.add_exception_handler(ModelmillError, _handle_error)
    app.add_exception_handler(RequestValidationError, _handle_validation_error)
    app.add_exception_handler(HTTPException, _handle_http_exception)
    app.add_exception_handler(ClientDisconnect, _handle_disconnect)
    app.add_exception_handler(Exception, _handle_error)
    app.openapi = lambda: _openapi_document(app)  # type: ignore[method-assign]
    guarded: ASGIApp = RequestMiddleware(_UnexpectedErrorLogger(app), service)
    if service.limits.allowed_origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=service.limits.allowed_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "Request-Id", "Retry-After"),
        )
    return guarded


async def _handle_openapi_request(request: Request) -> Response:
    """Serve the OpenAPI document; making it takes half a second."""
    return await run_in_threadpool(lambda: SurrogateSafeJsonResponse(request.app.openapi()))


def _openapi_document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document; invalid requests get 400 here, never 422."""
    if app.openapi_schema is None:
        app.openapi_schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for path in app.openapi_schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        add_response_schemas(app.openapi_schema)
        for name in ("HTTPValidationError", "ValidationError"):
            app.openapi_schema.get("components", {}).get("schemas", {}).pop(name, None)
    return app.openapi_schema


class _UnexpectedErrorLogger:
    """Logs unexpected exceptions.

    Starlette answers them with our 500 and raises them again; here they are logged and end.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self._app(scope, receive, send)
        except ApiError:
            raise
        except Exception:
            _log.exception("bug", extra={"data": {"request_id": scope.get("modelmill.request_id")}})


async def _handle_error(request: Request, error: Exception) -> Response:
    body = REQUEST_MODELS.get(request.url.path)
    api_error = errors.to_api_error(
        error,
        frozenset() if body is None else frozenset(body.model_fields),
        request.scope.get(REQUEST_FIELDS_SET_SCOPE_KEY, frozenset()),
    )
    if api_error.status == 500 and isinstance(error, ModelmillError):
        # the message is about this machine or engine, not the request; other exceptions are
        # logged by _UnexpectedErrorLogger
        data = {
            "request_id": request.scope.get("modelmill.request_id"),
            "error": type(error).__name__,
        }
        _log.error(
            "request failed",
            extra={
                "data": {
                    **data,
                    "reason": truncate_to_one_line(str(error), errors.MAX_MESSAGE_CHARS),
                }
            },
        )
    return error_response(api_error, request)


async def _handle_disconnect(_: Request, __: Exception) -> Response:
    # the client is gone; 499 is the usual status in logs
    return Response(status_code=499)


async def _handle_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = {404: "there is nothing at this path", 405: "this path takes another method"}.get(
        error.status_code
    )
    return error_response(
        ApiError(error.status_code, message or "refused", code=code, headers=error.headers),
        request,
    )


async def _handle_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    # bodies are validated by their routes: this is the query, or a part of the path
    fields = [{**each, "loc": each["loc"][1:]} for each in error.errors()]
    param, line = summarize_errors(fields)
    return error_response(invalid_request(line, param), request)


def error_response(error: ApiError, request: Request) -> Response:
    """Format an error as a response, in the form of the request's path."""
    body = error_body(
        request.url.path,
        error,
        request.scope.get("modelmill.request_id"),
        for_anthropic=ANTHROPIC_VERSION_HEADER in request.headers,
    )
    return SurrogateSafeJsonResponse(body, error.status, error.headers)
