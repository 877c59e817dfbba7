"""Health, served models, version and metrics."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, Response

from modelmill import __version__
from modelmill.serve.catalogue.load_metrics import load_progress_gauge
from modelmill.serve.catalogue.status import model_status
from modelmill.serve.dialects.anthropic_models import (
    ANTHROPIC_VERSION_HEADER,
    MAX_MODEL_PAGE,
    anthropic_model_card,
    anthropic_model_page,
)
from modelmill.serve.engine_client import EngineClient
from modelmill.serve.engine_state import EngineState
from modelmill.serve.errors import invalid_request
from modelmill.serve.metrics import CONTENT_TYPE
from modelmill.serve.query_parameters import check_query_parameters
from modelmill.serve.response_body_models import LLAMA_CPP_ERRORS
from modelmill.serve.routes.common import get_service
from modelmill.serve.service import Service
from modelmill.text.tokenizer_loader import Tokenizer

router = APIRouter()
REJECT_UNKNOWN_QUERY_PARAMETERS = [Depends(check_query_parameters)]
_PAGING_HEADER_HINT = f"with the header {ANTHROPIC_VERSION_HEADER}"


@router.get(
    "/health", summary="200 when every engine accepts requests, 503 with the reason otherwise"
)
async def health(request: Request) -> JSONResponse:
    """State of every engine, with the progress of those that are loading."""
    service = get_service(request)
    status = "ok" if service.is_ready else "draining" if service.draining else "unavailable"
    if status == "unavailable" and any(
        engine.state is EngineState.LOADING for engine in service.always_loaded_engines
    ):
        status = "loading"
    body = {
        "status": status,
        "engines": [_engine_status(service, engine) for engine in service.unique_engines],
    }
    return JSONResponse(
        body, 200 if service.is_ready else 503, None if service.is_ready else {"Retry-After": "2"}
    )


@router.post("/ping", include_in_schema=False)
@router.get("/ping", include_in_schema=False)
async def ping(request: Request) -> Response:
    """200 when every engine accepts requests, 503 otherwise."""
    return Response(status_code=200 if get_service(request).is_ready else 503)


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
    catalogue = service.catalogue
    progress = load_progress_gauge(
        (engine.name, model_status(engine, catalogue).progress) for engine in service.unique_engines
    )
    gauges = () if catalogue is None else catalogue.metric_families()
    return Response(
        service.metrics.render(stats_by_name, [progress, *gauges]), media_type=CONTENT_TYPE
    )


@router.get("/v1/models", dependencies=REJECT_UNKNOWN_QUERY_PARAMETERS)
async def models(
    request: Request,
    limit: Annotated[
        int | None, Query(ge=1, le=MAX_MODEL_PAGE, description=_PAGING_HEADER_HINT)
    ] = None,
    after_id: Annotated[str | None, Query(description=_PAGING_HEADER_HINT)] = None,
    before_id: Annotated[str | None, Query(description=_PAGING_HEADER_HINT)] = None,
) -> dict[str, Any]:
    """List the served engines as OpenAI models; with anthropic-version, as Anthropic's in pages."""
    service = get_service(request)
    if ANTHROPIC_VERSION_HEADER in request.headers:
        cards = [
            anthropic_model_card(name, engine, engine.max_model_len)
            for name, engine in service.engines.items()
        ]
        return anthropic_model_page(cards, limit, after_id, before_id)
    for name in ("limit", "after_id", "before_id"):
        if name in request.query_params:
            raise invalid_request(
                f"{name}: models come in pages only {_PAGING_HEADER_HINT}; send it, or leave "
                f"{name} out",
                name,
            )
    return {
        "object": "list",
        "data": [_model_card(service, name, engine) for name, engine in service.engines.items()],
    }


@router.get("/v1/models/{name:path}", dependencies=REJECT_UNKNOWN_QUERY_PARAMETERS)
async def model(request: Request, name: str) -> dict[str, Any]:
    """Describe one served engine as an OpenAI model; with anthropic-version, as Anthropic's."""
    service = get_service(request)
    engine = service.get_engine(name)
    if ANTHROPIC_VERSION_HEADER in request.headers:
        return anthropic_model_card(name, engine, engine.max_model_len)
    return _model_card(service, name, engine)


@router.get("/props", dependencies=REJECT_UNKNOWN_QUERY_PARAMETERS, responses=LLAMA_CPP_ERRORS)
async def props(request: Request, model: str | None = None) -> dict[str, Any]:
    """What llama.cpp's clients ask about a server: of the only engine, or of a named one."""
    service = get_service(request)
    engine = service.get_engine(model or service.only_model_name())
    limits, processor = engine.request_limits, engine.text_processor
    return {
        "default_generation_settings": {
            "n_ctx": limits.max_len,
            "params": processor.generation_defaults.to_dict()["values"],
        },
        "total_slots": limits.max_seqs,
        "model_alias": next(name for name, each in service.engines.items() if each is engine),
        "model_path": str(processor.path.name),
        "modalities": {"vision": processor.supports_images, "audio": False},
        "chat_template": processor.chat_template_text,
        "bos_token": _special_token_text(processor.tokenizer, "bos_token"),
        "eos_token": _special_token_text(processor.tokenizer, "eos_token"),
        "build_info": f"modelmill {__version__}",
    }


def _special_token_text(tokenizer: Tokenizer | None, name: str) -> str:
    return "" if tokenizer is None else tokenizer.template_names.get(name, "")


def _engine_status(service: Service, engine: EngineClient) -> dict[str, Any]:
    shown = model_status(engine, service.catalogue)
    state = engine.state.value
    if shown.on_demand and engine.state is not EngineState.RESTARTING:
        state = EngineState.READY.value if shown.state == "loaded" else shown.state
    status: dict[str, Any] = {"name": engine.name, "state": state, "restarts": engine.restarts}
    if shown.state in ("loading", "failed"):
        progress = engine.progress
        status["progress"] = {
            "stage": progress.stage,
            "done": progress.done,
            "total": progress.total,
            "fraction": progress.fraction,
        }
    if shown.on_demand:
        status |= {"pinned": shown.pinned, "waiting": shown.num_waiting}
        status |= {"expires_at": None if shown.expires_at is None else int(shown.expires_at)}
        status |= {} if shown.error is None else {"error": shown.error}
    return status


def _model_card(service: Service, name: str, engine: EngineClient) -> dict[str, Any]:
    defaults, suggested = engine.api_and_web_sampling_defaults or (None, None)
    shown = model_status(engine, service.catalogue)
    return {
        "id": name,
        "object": "model",
        "created": engine.created_at,
        "owned_by": "modelmill",
        "root": engine.name,
        "max_model_len": engine.max_model_len,
        "state": shown.state,
        "progress": shown.progress,
        "pinned": shown.pinned,
        "expires_at": None if shown.expires_at is None else int(shown.expires_at),
        "kind": engine.engine_type,
        "engine_type": engine.engine_type,
        "input_modalities": engine.input_modalities,
        "chat": engine.has_chat_template,
        "default_sampling": defaults,
        "suggested_sampling": suggested,
    }
