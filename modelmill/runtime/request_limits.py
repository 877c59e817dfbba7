"""Refuses requests that can never be served, before they are queued."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from modelmill.core.errors import RequestError
from modelmill.core.quoting import quote
from modelmill.core.types import POOL_LAST, POOL_MEAN, Request


@dataclass(frozen=True)
class RequestLimits:
    """Limits that a request must fit.

    Attributes:
        vocab_size: Token ids are below it.
        max_len: Most tokens of a sequence.
        kv_tokens: Tokens that all KV pages hold.
        max_seqs: Most sequences of a step.
    """

    vocab_size: int
    max_len: int
    kv_tokens: int
    max_seqs: int


def check_request(request: Request, limits: RequestLimits) -> np.ndarray:
    """Check a request against the limits.

    Returns:
        The prompt's ids [T] int64.

    Raises:
        RequestError: It can never be served; one line.
    """
    params, prompt = request.params, request.prompt
    if not prompt:
        raise RequestError("the prompt is empty; give at least one token")
    ids = prompt_ids(prompt)
    if ids is None or ids.min() < 0 or ids.max() >= limits.vocab_size:
        raise RequestError(f"the prompt's token ids must be between 0 and {limits.vocab_size - 1}")
    max_prompt = limits.max_len - (params.max_tokens != 0)
    if len(prompt) > max_prompt:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, this engine takes {max_prompt} and an answer "
            f"within {limits.max_len}; shorten it"
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
            raise RequestError("an embedding request must have max_tokens=0, n=1 and num_beams=1")
    if params.num_beams > limits.max_seqs:
        raise RequestError(
            f"num_beams={params.num_beams} exceeds the {limits.max_seqs} sequences of a step "
            "(max_num_seqs, "
            "max_num_batched_tokens); lower it"
        )
    id_options = (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids))
    for name, option_ids in id_options:
        outside = [t for t in option_ids if t >= limits.vocab_size]
        if outside:
            raise RequestError(
                f"{name}: token ids must be between 0 and {limits.vocab_size - 1}, not {outside[0]}"
            )
    for span in request.embedding_spans:
        if span.position < 0 or span.length < 1 or span.position + span.length > len(prompt):
            raise RequestError("an embedding span exceeds the prompt")
    return ids


def prompt_ids(prompt: Collection[int]) -> np.ndarray | None:
    """Ids as [T] int64; None if one does not fit into int64."""
    try:
        return np.fromiter(prompt, np.int64, len(prompt))
    except OverflowError:
        return None
