"""Requests that load and unload models, and their response."""

from __future__ import annotations

from pydantic import Field

from modelmill.serve.response_model import ResponseModel
from modelmill.serve.strict_models import StrictModel


class ModelRequest(StrictModel):
    """Request body of the paths that change the state of a model."""

    model: str = Field(max_length=1024)


class LoadRequest(ModelRequest):
    """Request body of POST /v1/models/load."""

    wait: bool | None = Field(None, description="false: answer before the model is loaded")


class PinRequest(ModelRequest):
    """Request body of POST /v1/models/pin."""

    pinned: bool | None = Field(None, description="false: no longer")


class ModelStateResponse(ResponseModel):
    """Response body of the paths that change the state of a model."""

    success: bool
    model: str
    state: str
