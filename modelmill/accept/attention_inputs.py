"""What an engine's attention read: its rounded queries, and keys and values of its pages.

The bounds of attention hold for scores of ordinary size. A softmax multiplies the error of a score:
where scores reach 160 (stories260K with int4 weights), bfloat16's rounding of queries and keys
alone moves the output by 7.5 % of its scale, while the error of the kernel is 0.3 %. On the same
rounded inputs only the error of the kernel is left, if these inputs are the right ones.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from modelmill.accept.reference import ModuleIO

ATTENTION_INPUT_BOUND_KEYS = ("rotary", "rotary", "residual")
"""Of queries, keys (or rows of latent vectors) and values: keys of MODULE_BOUNDS."""


def gather_attention_inputs(
    attention: ModuleIO, cache_index: int, q: Tensor, step: Any
) -> list[Tensor] | None:
    """Return what an attention read, in the shapes, dtypes and on the devices of the reference's.

    Args:
        attention: the reference's.
        cache_index: whose pages the engine's attention reads.
        q: the queries that it was given [T, heads, dim]: the reference's, rounded.
        step: the engine's step, of one whole sequence.

    Returns:
        Queries, keys and values (latent attention: queries and rows of the cache); None if the
        engine's have other sizes than the reference's.
    """
    pages = (step.kv.k[cache_index], step.kv.v[cache_index])
    read = (q, *(gather_slots(each, step) for each in pages))[: len(attention.inputs)]
    pairs = list(zip(read, attention.inputs, strict=True))
    if any(ours.numel() != right.numel() for ours, right in pairs):
        return None
    return [ours.to(right.device, right.dtype).reshape(right.shape) for ours, right in pairs]


def gather_slots(pages: Tensor, step: Any) -> Tensor:
    """Return the rows [T, kv_heads, dim] of a step's tokens in pages of keys or values."""
    size = step.kv.page_size
    return pages[step.slots // size, :, step.slots % size]
