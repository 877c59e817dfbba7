"""ALiBi's slopes (arXiv:2108.12409, section 3 and appendix A)."""

from __future__ import annotations

import math


def alibi_slopes(heads: int, largest: float = 8.0) -> list[float]:
    """Return the slope of each head.

    For n heads, n a power of two, they are the powers 1 … n of 2^(−largest / n). Other numbers of
    heads take those of the power of two below, then the first, third, fifth … of the next.
    """
    below = 2 ** math.floor(math.log2(heads))
    ratio = 2 ** (-largest / below)
    slopes = [ratio**i for i in range(1, below + 1)]
    finer = math.sqrt(ratio)
    return slopes + [finer ** (2 * i + 1) for i in range(heads - below)]
