"""Predicts page demand from output lengths: peak pages, and whether sequences end together.

The output length of a sequence is known if only its limit can end it (``ignore_eos``, no stop
strings). Any other sequence is counted at its current length.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq

import numpy as np

from modelmill.core.kv_page_counts import max_extra_step_pages, max_pages_between_steps
from modelmill.runtime.sequence import Sequence

MAX_OUTPUT_LIMIT_RATIO = 4 / 3
"""Longest over shortest output limit up to which sequences count as ending together."""


def ends_only_at_length_limit(seq: Sequence) -> bool:
    """Whether only its limit can end the sequence."""
    params = seq.request.params
    return (
        params.ignore_eos
        and seq.beam_search is None
        and seq.guide is None
        and not (params.stop or seq.stop_ids)
    )


def have_similar_output_limits(seqs: Iterable[Sequence]) -> bool:
    """Whether the output limits are within MAX_OUTPUT_LIMIT_RATIO of each other."""
    max_outputs = [max(seq.max_length - seq.prompt_len, 1) for seq in seqs]
    return not max_outputs or max(max_outputs) <= MAX_OUTPUT_LIMIT_RATIO * min(max_outputs)


def predict_peak_pages(
    seqs: Collection[Sequence],
    page_size: int,
    windows: Seq[int | None] = (None,),
    step_tokens: int = 0,
) -> int:
    """Most pages that the sequences use at once, if each grows by one token per step until it ends.

    Last pages count as half full; a shared page counts once per sequence.

    Args:
        seqs: The sequences.
        page_size: Tokens of a page.
        windows: Of each page group; pages behind it are freed.
        step_tokens: Most tokens of a step.

    Returns:
        The number of pages; 0 if no output length is known.
    """
    peaks = {
        window: _peak_full_attention_pages(seqs, page_size)
        if window is None
        else _peak_windowed_pages(seqs, page_size, window, step_tokens)
        for window in set(windows)
    }
    return sum(peaks[window] for window in windows)


def _peak_full_attention_pages(seqs: Iterable[Sequence], page_size: int) -> int:
    """As ``predict_peak_pages``, of layers with full attention."""
    lengths = []
    tokens_left = []
    unknown_pages = 0
    for seq in seqs:
        if ends_only_at_length_limit(seq):
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


def _peak_windowed_pages(
    seqs: Iterable[Sequence], page_size: int, window: int, step_tokens: int
) -> int:
    """As ``predict_peak_pages``, of layers with a window.

    Sequences count with the most that each will use, as if all ended last.
    """
    known = False
    pages = 0
    for seq in seqs:
        known |= ends_only_at_length_limit(seq)
        length = seq.max_length if ends_only_at_length_limit(seq) else seq.length
        pages += max_pages_between_steps(length, page_size, window)
    return pages + max_extra_step_pages(step_tokens, page_size, window) if known else 0
