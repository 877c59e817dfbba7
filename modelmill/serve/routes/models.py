"""POST /v1/models/load and /v1/models/unload, as llama.cpp's router has them; pin and reload."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from modelmill.serve.body_route import BodyRoute
from modelmill.serve.catalogue.managed_model import ManagedModel
from modelmill.serve.catalogue.manager import ModelManager
from modelmill.serve.catalogue.status import model_status
from modelmill.serve.errors import ApiError
from modelmill.serve.model_admin_schema import LoadRequest, ModelRequest, PinRequest
from modelmill.serve.openai_format import SurrogateSafeJsonResponse
from modelmill.serve.routes.common import get_service
from modelmill.serve.service import ADMIN_SCOPE_KEY
from modelmill.serve.stream import run_while_connected

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/models/load")
async def load(body: LoadRequest, request: Request) -> Any:
    """Load a model of the catalogue, in turn with the requests that wait for others."""
    service = get_service(request)
    engine = service.get_engine(body.model)
    model = None if service.catalogue is None else service.catalogue.find_model_by_client(engine)
    if service.catalogue is not None and model is not None:
        if body.wait is False:
            service.catalogue.start_load(model)
        else:
            await run_while_connected(request.receive, service.catalogue.load(model))
    return _model_state_response(request, body.model)


@router.post("/v1/models/unload")
async def unload(body: ModelRequest, request: Request) -> Any:
    """Unload a model of the catalogue once the requests that use it have ended."""
    catalogue, model = _require_admin_and_managed_model(request, body.model)
    if model.pinned:
        raise ApiError(409, f"the model {model.name} is pinned", param="model", code="pinned")
    await run_while_connected(request.receive, catalogue.unload(model))
    return _model_state_response(request, body.model)


@router.post("/v1/models/pin")
async def pin(body: PinRequest, request: Request) -> Any:
    """Keep a model loaded whatever time and memory say, or not any more."""
    catalogue, model = _require_admin_and_managed_model(request, body.model)
    catalogue.pin(model, body.pinned is not False)
    return _model_state_response(request, body.model)


@router.post("/v1/models/reload")
async def reload(body: ModelRequest, request: Request) -> Any:
    """Load the changed files of a loaded model; the requests that it answers go on."""
    catalogue, model = _require_admin_and_managed_model(request, body.model)
    # not with the request: a client that leaves must not end the old worker's last requests
    await asyncio.shield(catalogue.start_reload(model))
    return _model_state_response(request, body.model)


def _require_admin_and_managed_model(
    request: Request, name: str
) -> tuple[ModelManager, ManagedModel]:
    """A model of the catalogue, for an administrator.

    Raises:
        ApiError: 403, the request has no admin key; 404, there is no such model; 409, it is always
            loaded.
    """
    service = get_service(request)
    if not request.scope.get(ADMIN_SCOPE_KEY):
        if service.limits.admin_keys:
            reason = "this path needs an admin key"
        else:
            reason = "this server has no admin key; start it with --admin-key"
        raise ApiError(403, reason, "permission_error", code="admin_key_required")
    engine = service.get_engine(name)
    model = None if service.catalogue is None else service.catalogue.find_model_by_client(engine)
    if service.catalogue is None or model is None:
        raise ApiError(
            409,
            f"the model {engine.name} was given as an argument of serve and stays loaded; list it "
            "in a catalogue instead",
            param="model",
            code="always_loaded",
        )
    return service.catalogue, model


def _model_state_response(request: Request, name: str) -> SurrogateSafeJsonResponse:
    service = get_service(request)
    shown = model_status(service.get_engine(name), service.catalogue)
    return SurrogateSafeJsonResponse({"success": True, "model": name, "state": shown.state})
