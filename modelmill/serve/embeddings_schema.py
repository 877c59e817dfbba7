"""Requests of /v1/embeddings, and the conversion of pooled states to vectors."""

from __future__ import annotations

import base64
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from modelmill.core.errors import RequestError
from modelmill.core.types import MAX_INT32, MEAN_POOLING
from modelmill.outputs import truncate_and_normalize
from modelmill.serve.compatibility_fields import PoolingCompatibilityFields
from modelmill.serve.engine_request_fields import EngineRequestFields
from modelmill.serve.message_cleaning import ChatMessages
from modelmill.serve.prompt_fields import (
    PromptTokenIds,
    TextList,
    TokenIdLists,
    list_prompts,
    resolve_truncated_length,
)
from modelmill.serve.strict_models import JsonObject, ModelName, Text

TruncatedTokens = Annotated[int, Field(ge=-1, le=MAX_INT32)]
"""How many tokens of a text are read; -1: as many as fit."""
MAX_INPUTS = 2048
"""Inputs of one request."""
MAX_OUTPUT_FLOATS = 1 << 21
"""Limit of numbers in one response as text, some 40 MB; base64 may have more."""


class EmbeddingRequest(EngineRequestFields, PoolingCompatibilityFields):
    """Request body of POST /v1/embeddings."""

    may_omit_model: ClassVar[bool] = True

    model: ModelName = ""
    input: Text | TextList | PromptTokenIds | TokenIdLists | None = Field(
        None, description="a string, a list of strings, token ids, or lists of them; up to 2048"
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=MAX_INT32)
    user: str | None = Field(None, max_length=4096)
    # extensions: a conversation in the place of the input, read through the chat template
    messages: ChatMessages | None = Field(None, min_length=1)
    add_generation_prompt: bool | None = Field(
        None, description="true: the prompt of messages ends with the start of an answer"
    )
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    add_special_tokens: bool | None = Field(None, description="false: no BOS before texts")
    pooling: Literal["mean", "last"] | None = Field(
        None, description="of the final hidden states; default: mean"
    )
    truncate_prompt_tokens: TruncatedTokens | None = None

    def truncated_input_length(self, max_model_len: int) -> int | None:
        """How many of an input's first tokens are read; None: all.

        Raises:
            RequestError: none would be, or more than the engine takes.
        """
        return resolve_truncated_length(self.truncate_prompt_tokens, max_model_len, max_model_len)

    def inputs(self) -> list[str | list[int]]:
        """The inputs as a list.

        Raises:
            RequestError: there are none or too many, or one is empty.
        """
        if self.input is None:
            raise RequestError("input: field required, or messages in its place")
        return list_prompts(self.input, "input", "items", MAX_INPUTS)

    def check_messages(self) -> None:
        """Raise RequestError for fields that exclude a conversation, or need one."""
        if self.messages is None:
            names = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
            needless = next((name for name in names if getattr(self, name)), None)
            if needless is not None:
                raise RequestError(f"{needless} needs messages; input is read as it is")
            return
        if self.input is not None:
            raise RequestError("input and messages exclude each other; give one of them")
        if self.add_special_tokens:
            raise RequestError(
                "add_special_tokens has no effect on messages: the chat template writes them"
            )

    @property
    def pooling_type(self) -> str:
        """The pooling, or its default."""
        return self.pooling or MEAN_POOLING


def normalize_and_encode_embedding(
    state: bytes, dimensions: int | None, as_base64: bool
) -> list[float] | str:
    """Convert a pooled state (float32) to a vector of length 1.

    Args:
        state: float32 values.
        dimensions: keep only so many.
        as_base64: encode float32 values as base64.

    Raises:
        RequestError: the state has fewer dimensions, or is zero.
    """
    unit = truncate_and_normalize(state, dimensions)
    return base64.b64encode(unit.tobytes()).decode() if as_base64 else unit.tolist()
