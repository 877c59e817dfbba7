"""Fields of every request that runs a model."""

from __future__ import annotations

from pydantic import Field

from modelmill.core.types import MAX_INT32
from modelmill.serve.catalogue.keep_alive import KeepAliveField
from modelmill.serve.strict_models import StrictModel


class EngineRequestFields(StrictModel):
    """How a request shares an engine with others; vLLM has ``priority`` and ``cache_salt``."""

    cache_salt: str | None = Field(None, max_length=1024)
    keep_alive: KeepAliveField = None
    priority: int | None = Field(
        None, ge=-MAX_INT32, le=MAX_INT32, description="lower starts earlier; default: 0"
    )
