"""Results of a request as plain data: outputs, completions and streamed deltas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from modelmill.core.errors import RequestError
from modelmill.core.types import Logprob


@dataclass
class CompletionOutput:
    """One of the n completions of a prompt.

    Attributes:
        index: Which of the n completions.
        text: Without the stop string or stop token that ended it.
        token_ids: Include the stop token.
        finish_reason: "stop"; "length" (max_tokens or max_model_len reached); or "abort".
        stop_reason: The stop string or token id that matched.
        logprobs: One mapping of token id to Logprob per token.
        score: Of a beam search result.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[Mapping[int, Logprob]] | None = None
    score: float | None = None


@dataclass
class RequestOutput:
    """A prompt and its completions.

    Attributes:
        embedding: Of the prompt, if requested: [H] float32, little endian.
        first_token_seconds: Seconds from the start of the request to the first token, host clock.
        seconds: Seconds from the start of the request to the end of its last completion.
    """

    id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: Sequence[Mapping[int, Logprob] | None] | None = None
    cached_tokens: int = 0
    embedding: bytes | None = None
    first_token_seconds: float | None = None
    seconds: float | None = None

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(c.finish_reason is not None for c in self.outputs)


@dataclass(frozen=True)
class OutputDelta:
    """A streamed increment: text and ids added to completion ``index``."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    output: RequestOutput


def truncate_and_normalize(state: bytes, dimensions: int | None = None) -> np.ndarray:
    """Truncate a pooled state to ``dimensions`` and normalize it to length 1: [H] float32.

    Args:
        state: ``RequestOutput.embedding``.
        dimensions: None keeps all.

    Raises:
        RequestError: The state has fewer dimensions, or its length is zero or not finite.
    """
    x = np.frombuffer(state, dtype="<f4").astype(np.float64)
    if dimensions is not None:
        if dimensions > len(x):
            raise RequestError(
                f"dimensions={dimensions} exceeds this engine's embedding size, {len(x)}"
            )
        x = x[:dimensions]
    length = math.sqrt(float(x @ x))
    if not length > 0 or not math.isfinite(length):
        raise RequestError(
            "input has an embedding without a direction (all zeros); send another input, or "
            "ask for more dimensions"
        )
    return (x / length).astype("<f4")


def stack_normalized_embeddings(
    outputs: Sequence[RequestOutput], dimensions: int | None
) -> np.ndarray:
    """Stack embeddings as rows [N, H] float32 of length 1. Raises RequestError."""
    if not outputs:
        raise RequestError("there is nothing to embed; give at least one prompt")
    states = [output.embedding for output in outputs]
    assert all(state is not None for state in states), "every output of a pooling request has one"
    return np.stack(
        [truncate_and_normalize(state, dimensions) for state in states if state is not None]
    )
