"""The reference's attention of what the engine's attention read.

The bounds of attention hold for scores of ordinary size. A softmax multiplies the error of a score:
where scores reach 160 (stories260K with int4 weights), bfloat16's rounding of queries and keys
alone moves the output by 7.5 % of its scale, while the error of the kernel is 0.3 %. Queries, keys
and values are compared before, each with its own bound; on the same rounded ones only the error of
the kernel is left.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference import ModuleIO


@torch.no_grad()
def attend_to_engine_inputs(
    attention: ModuleIO, cache_index: int, q: Tensor, step: Any
) -> Tensor | None:
    """Run the reference's attention on the engine's queries and the keys and values of its pages.

    Args:
        attention: the reference's, with its function.
        cache_index: whose pages the engine's attention reads.
        q: the engine's rotated queries [T, heads, dim].
        step: the engine's step, of one whole sequence.

    Returns:
        [T, heads·dim], or None if the engine's tensors have other sizes than the reference's.
    """
    assert attention.function is not None, "the reference keeps the function of an attention"
    pages = (step.kv.k[cache_index], step.kv.v[cache_index])
    read = (q, *(gather_slots(each, step) for each in pages))[: len(attention.inputs)]
    if any(a.numel() != b.numel() for a, b in zip(read, attention.inputs, strict=True)):
        return None
    like = zip(read, attention.inputs, strict=True)
    return attention.function(*(a.to(b.device, b.dtype).reshape(b.shape) for a, b in like))


def gather_slots(pages: Tensor, step: Any) -> Tensor:
    """Return the rows [T, kv_heads, dim] of a step's tokens in pages of keys or values."""
    size = step.kv.page_size
    return pages[step.slots // size, :, step.slots % size]
