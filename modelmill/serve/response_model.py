"""The base of response models."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ResponseModel(BaseModel):
    """No other keys than these."""

    model_config = ConfigDict(extra="forbid")
