"""Predicts page demand from output lengths: peak pages, and whether sequences end together.

The output length of a sequence is known if only its limit can end it (``ignore_eos``, no stop
strings). Any other sequence is counted at its current length.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from modelmill.core.errors import RequestError
from modelmill.core.quoting import quote
from modelmill.core.types import POOL_LAST, POOL_MEAN, Request
from modelmill.runtime.sequence import Sequence


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


MAX_LENGTH_RATIO = 4 / 3
"""Longest over shortest output limit up to which sequences count as ending together."""


def ends_at_limit(seq: Sequence) -> bool:
    """Whether only its limit can end the sequence."""
    params = seq.request.params
    return (
        params.ignore_eos
        and seq.beam_search is None
        and seq.guide is None
        and not (params.stop or seq.stop_ids)
    )


def similar_lengths(seqs: Iterable[Sequence]) -> bool:
    """Whether the output limits are within MAX_LENGTH_RATIO of each other."""
    max_outputs = [max(seq.max_length - seq.prompt_len, 1) for seq in seqs]
    return not max_outputs or max(max_outputs) <= MAX_LENGTH_RATIO * min(max_outputs)


def peak_pages(seqs: Iterable[Sequence], page_size: int) -> int:
    """Most pages that the sequences use at once, if each grows by one token per step until it ends.

    Last pages count as half full; a shared page counts once per sequence. Returns 0 if no output
    length is known.
    """
    lengths = []
    tokens_left = []
    unknown_pages = 0
    for seq in seqs:
        if ends_at_limit(seq):
            lengths.append(seq.length)
            tokens_left.append(max(seq.max_length - seq.length, 0))
        else:
            unknown_pages += -(-seq.length // page_size)
    if not lengths:
        return 0
    by_end = np.argsort(tokens_left, kind="stable")
    current, remaining = np.array(lengths)[by_end], np.array(tokens_left)[by_end]
    # the maximum is just before some k-th sequence ends, when it and all later ones are running
    count = np.arange(len(current), 0, -1)
    tokens = np.cumsum(current[::-1])[::-1] + count * remaining
    return unknown_pages + int(np.max(tokens / page_size + count / 2)) + 1
