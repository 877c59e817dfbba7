"""Which requests can never be served: refused before they are queued."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from modelmill.core.errors import RequestError
from modelmill.core.quote import quoted
from modelmill.core.types import LAST, MEAN, Request


@dataclass(frozen=True)
class Bounds:
    """vocab: token ids. longest: tokens of a sequence. kv: tokens that all pages hold. seqs: sequences of a step."""

    vocab: int
    longest: int
    kv: int
    seqs: int


def check(request: Request, bounds: Bounds) -> np.ndarray:
    """The prompt's ids [T] int64. Raises RequestError, one line, for what is impossible under ``bounds``."""
    params, prompt = request.params, request.prompt
    if not prompt:
        raise RequestError("the prompt is empty; give at least one token")
    known = ids_of(prompt)
    if known is None or known.min() < 0 or known.max() >= bounds.vocab:
        raise RequestError(f"the prompt holds token ids outside 0…{bounds.vocab - 1}")
    room = bounds.longest - (params.max_tokens != 0)
    if len(prompt) > room:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, this engine takes {room} and an answer within {bounds.longest}; "
            "shorten it"
        )
    if len(prompt) > bounds.kv:
        raise RequestError(f"the prompt has {len(prompt)} tokens, the KV cache holds {bounds.kv}; shorten it")
    if request.pooling is not None:
        if request.pooling not in (MEAN, LAST):
            raise RequestError(f"pooling must be {MEAN} or {LAST}, not {quoted(request.pooling, 60)}")
        if params.max_tokens != 0 or params.n != 1 or params.num_beams != 1:
            raise RequestError("an embedding is asked for without an answer: max_tokens=0, n=1, num_beams=1")
    if params.num_beams > bounds.seqs:
        raise RequestError(
            f"num_beams={params.num_beams} exceeds the {bounds.seqs} sequences of a step (max_num_seqs, "
            "max_num_batched_tokens); lower it"
        )
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        outside = [t for t in ids if t >= bounds.vocab]
        if outside:
            raise RequestError(f"{name} names a token id outside 0…{bounds.vocab - 1}: {outside[0]}")
    for insert in request.inserts:
        if insert.position < 0 or insert.length < 1 or insert.position + insert.length > len(prompt):
            raise RequestError("an insert reaches outside the prompt")
    return known


def ids_of(prompt: Collection[int]) -> np.ndarray | None:
    """Ids [T] int64; None where one is too large for that."""
    try:
        return np.fromiter(prompt, np.int64, len(prompt))
    except OverflowError:
        return None
