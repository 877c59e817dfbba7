"""What comes back for a prompt: plain data in text and ids."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from modelmill.core.errors import RequestError
from modelmill.core.types import Logprob


@dataclass
class CompletionOutput:
    """One of the n answers. token_ids include the token that ended it, text does not.

    finish_reason: stop; length (max_tokens, or the end of what the engine reads, whichever comes
    first); or abort. stop_reason: the stop string or token id that matched. score: of a beam.
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
    """A prompt and its completions. Times are seconds since the request was added, by the host's
    clock.

    embedding: of the prompt, where that was asked for; H numbers of float32, little endian.
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
    """News of a streamed answer: text and ids that were added to completion ``index``."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    output: RequestOutput


def unit_vector(state: bytes, dimensions: int | None = None) -> np.ndarray:
    """A pooled state (``RequestOutput.embedding``) cut to its first ``dimensions`` and brought to
    length 1, [H] float32.

    Raises RequestError where it has fewer dimensions, or no direction.
    """
    x = np.frombuffer(state, dtype="<f4").astype(np.float64)
    if dimensions is not None:
        if dimensions > len(x):
            raise RequestError(
                f"dimensions={dimensions} exceeds the {len(x)} of this engine's states"
            )
        x = x[:dimensions]
    length = math.sqrt(float(x @ x))
    if not length > 0 or not math.isfinite(length):
        raise RequestError(
            "input has a state without a direction (all zeros); give another, or more dimensions"
        )
    return (x / length).astype("<f4")
