"""Softmax over keys in blocks and in parts (arXiv:1805.02867); scores are to the base of two.

Computes: weights of a block's scores relative to the largest score so far; results of parts, each
    relative to its own maximum, relative to the largest
Dtypes: float32
Layout: registers
Range: any number of scores
Technique: a running maximum for each row, by whose change earlier sums are rescaled
Used by: image_attention.py, paged_decode.py, paged_latent.py, relative_attention.py
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softmax_weights(score, row_max):
    """Weights of a block of keys.

    Args:
        score: [rows, keys].
        row_max: [rows], maxima of the scores of earlier blocks.

    Returns:
        The maxima with this block's, the factor of earlier sums [rows], and the weights.
    """
    new_max = tl.maximum(row_max, tl.max(score, axis=1))
    return new_max, tl.exp2(row_max - new_max), tl.exp2(score - new_max[:, None])


@triton.jit
def combine_partials(acc, row_max, exp_sum):
    """Partial results of one softmax, each relative to its own maximum, relative to the largest.

    Args:
        acc: [parts, D], weighted sums of values.
        row_max: [parts], maxima of the scores.
        exp_sum: [parts], sums of the weights.

    Returns:
        The weighted sum [D], the maximum, and the sum of the weights.
    """
    max_all = tl.max(row_max, axis=0)
    share = tl.exp2(row_max - max_all)
    return tl.sum(acc * share[:, None], axis=0), max_all, tl.sum(exp_sum * share, axis=0)
