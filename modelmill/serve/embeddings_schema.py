"""What /v1/embeddings is asked, and how a pooled state becomes the vector that is sent."""

from __future__ import annotations

import base64
from typing import Any, Literal

from pydantic import Field

from modelmill.core.errors import RequestError
from modelmill.core.types import POOL_MEAN
from modelmill.outputs import unit_vector
from modelmill.serve.schema import MAX_INT32, TextList, TokenIdLists, TokenIds
from modelmill.serve.strict_models import StrictModel

MAX_INPUTS = 2048
"""Texts of one request."""
MAX_OUTPUT_FLOATS = 1 << 21
"""Numbers of one answer that are written out, some 40 MB; packed ones may be more."""


class EmbeddingRequest(StrictModel):
    """POST /v1/embeddings."""

    model: str = Field(max_length=1024)
    input: str | TextList | TokenIds | TokenIdLists = Field(
        description="a text, a list of texts, token ids, or lists of them; up to 2048"
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=MAX_INT32)
    user: str | None = Field(None, max_length=4096)
    # ours
    pooling: Literal["mean", "last"] | None = Field(
        None, description="of the final hidden states; default: mean"
    )
    cache_salt: str | None = Field(None, max_length=1024)

    def inputs(self) -> list[str | list[int]]:
        """The inputs, one or many. Raises RequestError for empty ones."""
        raw = self.input
        listed: list[Any] = (
            [raw] if isinstance(raw, str) or (raw and isinstance(raw[0], int)) else list(raw)
        )
        if not listed or any(len(each) == 0 for each in listed):
            raise RequestError("input is empty; give at least one token")
        if len(listed) > MAX_INPUTS:
            raise RequestError(f"input holds {len(listed)} texts; up to {MAX_INPUTS} are taken")
        return listed

    @property
    def pooling_type(self) -> str:
        """How states are pooled."""
        return self.pooling or POOL_MEAN


def format_embedding(state: bytes, dimensions: int | None, as_base64: bool) -> list[float] | str:
    """A pooled state (float32) cut to its first ``dimensions`` and brought to length 1; as_base64:
    of float32.

    Raises RequestError where it has fewer dimensions, or no direction.
    """
    unit = unit_vector(state, dimensions)
    return base64.b64encode(unit.tobytes()).decode() if as_base64 else unit.tolist()
