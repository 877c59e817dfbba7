"""What is known of how long answers will be: how many pages they need at their worst moment,
whether they end together.

An answer that ignores the end of text has as many tokens as its limit says. One that may end
earlier is taken as it is: what it will need is nobody's knowledge.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from modelmill.runtime.sequence import Sequence

MAX_LENGTH_RATIO = 4 / 3
"""The longest answer over the shortest, of those that are taken to end together."""


def ends_at_limit(seq: Sequence) -> bool:
    """Whether nothing but its limit ends the answer."""
    params = seq.request.params
    return (
        params.ignore_eos
        and seq.beam_search is None
        and seq.guide is None
        and not (params.stop or seq.stop_ids)
    )


def similar_lengths(seqs: Iterable[Sequence]) -> bool:
    """Whether no answer may become much longer than another, by their limits."""
    max_outputs = [max(seq.max_length - seq.prompt_len, 1) for seq in seqs]
    return not max_outputs or max(max_outputs) <= MAX_LENGTH_RATIO * min(max_outputs)


def peak_pages(seqs: Iterable[Sequence], page_size: int) -> int:
    """Pages of ``page_size`` tokens that they hold together at most, each growing by a token a step
    until it ends.

    Last pages count as half full; pages that two of them share are counted twice. 0 where nothing
    is known of any.
    """
    lengths, left, staying = [], [], 0
    for seq in seqs:
        if ends_at_limit(seq):
            lengths.append(seq.length)
            left.append(max(seq.max_length - seq.length, 0))
        else:
            staying += -(-seq.length // page_size)
    if not lengths:
        return 0
    by_end = np.argsort(left, kind="stable")
    now, ahead = np.array(lengths)[by_end], np.array(left)[by_end]
    # just before the k-th of them ends, it and those behind it are there
    count = np.arange(len(now), 0, -1)
    tokens = np.cumsum(now[::-1])[::-1] + count * ahead
    return staying + int(np.max(tokens / page_size + count / 2)) + 1
