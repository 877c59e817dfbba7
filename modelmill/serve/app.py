"""The HTTP application: routes, and errors in OpenAI's form."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

from modelmill import __version__
from modelmill.core import log
from modelmill.core.errors import ModelmillError
from modelmill.serve import errors
from modelmill.serve.errors import ApiError, invalid
from modelmill.serve.gate import Gate
from modelmill.serve.routes import chat, completions, health, tokenize
from modelmill.serve.schema import CHAT_FIELDS, COMPLETION_FIELDS
from modelmill.serve.service import Service

KNOWN = CHAT_FIELDS | COMPLETION_FIELDS
_log = log.get("serve")


def make_app(service: Service) -> ASGIApp:
    """The application of a service; the gate stands before it."""
    app = FastAPI(title="modelmill", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    for module in (health, completions, chat, tokenize):
        app.include_router(module.router)
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(ModelmillError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _refused)
    guarded: ASGIApp = Gate(_Unraised(app), service)
    if service.limits.origins:
        guarded = CORSMiddleware(
            guarded, allow_origins=service.limits.origins, allow_methods=("GET", "POST"), allow_headers=("*",)
        )
    return guarded


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


async def _refused(_: Request, error: Exception) -> Response:
    return answer(errors.of(error, KNOWN))


async def _gone(_: Request, __: Exception) -> Response:
    # nobody reads it; 499 is what others write into their logs for it
    return Response(status_code=499)


async def _http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 400:
        return answer(invalid("the request's body cannot be read as JSON"))
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    told = {404: "there is nothing at this path", 405: "this path takes another method"}.get(error.status_code)
    return answer(ApiError(error.status_code, told or "refused", code=code, headers=error.headers))


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return answer(invalid("the request's body is not JSON"))
    param = where[0] if where and where[0] in KNOWN else None
    name = ".".join(where)[:100] or "the request's body"
    message = first["msg"][:300]
    if first["type"] == "extra_forbidden":
        message = "unknown field"
    return answer(invalid(f"{name}: {message[:1].lower()}{message[1:]}", param or (where[0][:100] if where else None)))


def answer(error: ApiError) -> JSONResponse:
    """An error as a response."""
    return JSONResponse(error.body(), error.status, error.headers)
