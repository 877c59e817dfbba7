"""Which requests can never be served: refused before they are queued."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from modelmill.core.errors import RequestError
from modelmill.core.quoting import quote
from modelmill.core.types import POOL_LAST, POOL_MEAN, Request


@dataclass(frozen=True)
class RequestLimits:
    """max_len: tokens of a sequence.

    kv_tokens: that all pages hold. max_seqs: sequences of a step.
    """

    vocab_size: int
    max_len: int
    kv_tokens: int
    max_seqs: int


def check_request(request: Request, limits: RequestLimits) -> np.ndarray:
    """The prompt's ids [T] int64.

    Raises RequestError, one line, for what is impossible under ``limits``.
    """
    params, prompt = request.params, request.prompt
    if not prompt:
        raise RequestError("the prompt is empty; give at least one token")
    known = prompt_ids(prompt)
    if known is None or known.min() < 0 or known.max() >= limits.vocab_size:
        raise RequestError(f"the prompt holds token ids outside 0…{limits.vocab_size - 1}")
    room = limits.max_len - (params.max_tokens != 0)
    if len(prompt) > room:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, this engine takes {room} and an answer within "
            f"{limits.max_len}; "
            "shorten it"
        )
    if len(prompt) > limits.kv_tokens:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, the KV cache holds {limits.kv_tokens}; shorten it"  # noqa: E501
        )
    if request.pooling is not None:
        if request.pooling not in (POOL_MEAN, POOL_LAST):
            raise RequestError(
                f"pooling must be {POOL_MEAN} or {POOL_LAST}, not {quote(request.pooling, 60)}"
            )
        if params.max_tokens != 0 or params.n != 1 or params.num_beams != 1:
            raise RequestError(
                "an embedding is asked for without an answer: max_tokens=0, n=1, num_beams=1"
            )
    if params.num_beams > limits.max_seqs:
        raise RequestError(
            f"num_beams={params.num_beams} exceeds the {limits.max_seqs} sequences of a step "
            "(max_num_seqs, "
            "max_num_batched_tokens); lower it"
        )
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        outside = [t for t in ids if t >= limits.vocab_size]
        if outside:
            raise RequestError(
                f"{name} names a token id outside 0…{limits.vocab_size - 1}: {outside[0]}"
            )
    for insert in request.embedding_spans:
        if (
            insert.position < 0
            or insert.length < 1
            or insert.position + insert.length > len(prompt)
        ):
            raise RequestError("an insert reaches outside the prompt")
    return known


def prompt_ids(prompt: Collection[int]) -> np.ndarray | None:
    """Ids [T] int64; None where one is too large for that."""
    try:
        return np.fromiter(prompt, np.int64, len(prompt))
    except OverflowError:
        return None
