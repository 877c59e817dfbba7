"""Requests that save and restore sessions, and their response."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from modelmill.serve.catalogue.keep_alive import KeepAliveField
from modelmill.serve.engine_request_fields import EngineRequestFields
from modelmill.serve.prompt_fields import TokenIds
from modelmill.serve.response_model import ResponseModel
from modelmill.serve.strict_models import ModelName, StrictModel
from modelmill.serve.tokenize_schema import TokenizeRequest

SESSION_NAME_PATTERN = r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}$"


class RestoreSessionRequest(StrictModel):
    """Request body of POST /v1/sessions/restore."""

    may_omit_model: ClassVar[bool] = True

    model: ModelName = ""
    name: str = Field(pattern=SESSION_NAME_PATTERN, description="of the saved session")
    cache_salt: str | None = Field(None, max_length=1024)
    keep_alive: KeepAliveField = None


class SaveSessionRequest(TokenizeRequest, EngineRequestFields):
    """Request body of POST /v1/sessions/save: a prompt, ids, or messages as a chat."""

    name: str = Field(pattern=SESSION_NAME_PATTERN, description="of the saved session")
    tokens: TokenIds | None = Field(None, description="the prompt as token ids")


class SessionResponse(ResponseModel):
    """Response body of both paths."""

    name: str
    model: str
    tokens: int = Field(description="of the prefix whose KV pages were saved or restored")
    bytes: int


class SavedSession(ResponseModel):
    """A file of the session folder."""

    name: str
    bytes: int
    created: int = Field(description="seconds since 1970")


class SessionList(ResponseModel):
    """Response body of GET /v1/sessions."""

    object: Literal["list"]
    data: list[SavedSession]


class DeletedSession(ResponseModel):
    """Response body of DELETE /v1/sessions/NAME."""

    name: str
    deleted: Literal[True]
