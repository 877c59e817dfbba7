"""Health, served models, version and metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from modelmill import __version__
from modelmill.serve.engine_client import EngineClient, EngineState
from modelmill.serve.metrics import CONTENT_TYPE
from modelmill.serve.routes.common import get_service

router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.get(
    "/health", summary="200 when every engine accepts requests, 503 with the reason otherwise"
)
async def health(request: Request) -> JSONResponse:
    """State of every engine, with the progress of those that are loading."""
    service = get_service(request)
    status = "ok" if service.ready else "draining" if service.draining else "unavailable"
    if status == "unavailable" and any(
        engine.state is EngineState.LOADING for engine in service.unique_engines
    ):
        status = "loading"
    body = {
        "status": status,
        "engines": [_engine_status(engine) for engine in service.unique_engines],
    }
    return JSONResponse(
        body, 200 if service.ready else 503, None if service.ready else {"Retry-After": "2"}
    )


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of modelmill."""
    return {"version": __version__}


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus' text format."""
    service = get_service(request)
    stats_by_name = [
        (engine.name, stats)
        for engine in service.unique_engines
        if (stats := await engine.stats()) is not None
    ]
    return Response(service.metrics.render(stats_by_name), media_type=CONTENT_TYPE)


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """List the served engines as OpenAI models."""
    service = get_service(request)
    return {
        "object": "list",
        "data": [_model_card(name, engine) for name, engine in service.engines.items()],
    }


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    """Describe one served engine as an OpenAI model."""
    return _model_card(name, get_service(request).get_engine(name))


def _engine_status(engine: EngineClient) -> dict[str, Any]:
    status: dict[str, Any] = {
        "name": engine.name,
        "state": engine.state.value,
        "restarts": engine.restarts,
    }
    if engine.state is not EngineState.READY:
        progress = engine.progress
        status["progress"] = {
            "stage": progress.stage,
            "done": progress.done,
            "total": progress.total,
        }
    return status


def _model_card(name: str, engine: EngineClient) -> dict[str, Any]:
    defaults, suggested = engine.sampling_defaults or (None, None)
    longest = engine.engine_info.max_model_len or None if engine.engine_info is not None else None
    return {
        "id": name,
        "object": "model",
        "created": engine.created_at,
        "owned_by": "modelmill",
        "root": engine.name,
        "max_model_len": longest,
        "kind": engine.engine_type,
        "engine_type": engine.engine_type,
        "input_modalities": engine.input_modalities,
        "chat": engine.has_chat_template,
        "default_sampling": defaults,
        "suggested_sampling": suggested,
    }
