"""The field ``priority`` of requests, as in vLLM."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from modelmill.core.types import MAX_INT32

PriorityField = Annotated[
    int | None,
    Field(ge=-MAX_INT32, le=MAX_INT32, description="lower starts earlier; default: 0"),
]
