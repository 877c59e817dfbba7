"""What is known of how long answers will be: how many pages they need at their worst moment, whether they end together.

An answer that ignores the end of text has as many tokens as its limit says. One that may end earlier is taken as it is:
what it will need is nobody's knowledge.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from modelmill.runtime.sequence import Sequence

ALIKE = 4 / 3
"""The longest answer over the shortest, of those that are taken to end together."""


def ends_at_limit(seq: Sequence) -> bool:
    """Whether nothing but its limit ends the answer."""
    params = seq.request.params
    return params.ignore_eos and seq.beam is None and seq.guide is None and not (params.stop or seq.stops)


def alike(seqs: Iterable[Sequence]) -> bool:
    """Whether no answer may become much longer than another, by their limits."""
    longest = [max(seq.limit - seq.prompt_len, 1) for seq in seqs]
    return not longest or max(longest) <= ALIKE * min(longest)


def most_pages(seqs: Iterable[Sequence], size: int) -> int:
    """Pages of ``size`` tokens that they hold together at most, each growing by a token a step until it ends.

    Last pages count as half full; pages that two of them share are counted twice. 0 where nothing is known of any.
    """
    lengths, left, staying = [], [], 0
    for seq in seqs:
        if ends_at_limit(seq):
            lengths.append(seq.length)
            left.append(max(seq.limit - seq.length, 0))
        else:
            staying += -(-seq.length // size)
    if not lengths:
        return 0
    order = np.argsort(left, kind="stable")
    now, ahead = np.array(lengths)[order], np.array(left)[order]
    # just before the k-th of them ends, it and those behind it are there
    count = np.arange(len(now), 0, -1)
    tokens = np.cumsum(now[::-1])[::-1] + count * ahead
    return staying + int(np.max(tokens / size + count / 2)) + 1
