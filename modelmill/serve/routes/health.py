"""Whether the server lives, what it serves, and its counters."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from modelmill import __version__
from modelmill.serve.engine import Engine, State
from modelmill.serve.metrics import CONTENT_TYPE
from modelmill.serve.routes.common import service_of

router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.get("/health", summary="200 when every engine takes requests, 503 with the reason otherwise")
async def health(request: Request) -> JSONResponse:
    """Loading engines tell how far they are."""
    service = service_of(request)
    status = "ok" if service.ready else "draining" if service.draining else "unavailable"
    if status == "unavailable" and any(engine.state is State.LOADING for engine in service.distinct):
        status = "loading"
    body = {"status": status, "engines": [_state(engine) for engine in service.distinct]}
    return JSONResponse(body, 200 if service.ready else 503, None if service.ready else {"Retry-After": "2"})


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of modelmill."""
    return {"version": __version__}


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    service = service_of(request)
    told = [(engine.name, stats) for engine in service.distinct if (stats := await engine.stats()) is not None]
    return Response(service.metrics.page(told), media_type=CONTENT_TYPE)


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """What is served."""
    service = service_of(request)
    return {"object": "list", "data": [_card(name, engine) for name, engine in service.engines.items()]}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    """One of them."""
    return _card(name, service_of(request).engine(name))


def _state(engine: Engine) -> dict[str, Any]:
    told: dict[str, Any] = {"name": engine.name, "state": engine.state.value, "restarts": engine.restarts}
    if engine.state is not State.READY:
        progress = engine.progress
        told["progress"] = {"stage": progress.stage, "done": progress.done, "total": progress.total}
    return told


def _card(name: str, engine: Engine) -> dict[str, Any]:
    defaults, suggested = engine.sampling or (None, None)
    longest = engine.facts.max_model_len or None if engine.facts is not None else None
    return {
        "id": name,
        "object": "model",
        "created": engine.since,
        "owned_by": "modelmill",
        "root": engine.name,
        "max_model_len": longest,
        "kind": engine.kind,
        "input_modalities": engine.reads,
        "chat": engine.chats,
        "default_sampling": defaults,
        "suggested_sampling": suggested,
    }
