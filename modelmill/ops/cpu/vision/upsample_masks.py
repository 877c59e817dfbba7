"""Masks enlarged in C++ (upsample_masks.cpp), only where a mask can be.

Sums are taken in the order in which torch takes them for one mask at a time, so that these are its
bits there, too.
"""

from __future__ import annotations

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.upsample_masks import Masks, UpsampleMasksInputs, upsample_masks

unavailable_reason = build.unavailable_reason
_kernel = build.make_lazy_function_loader("upsample_masks", "pppqqqqqqqqd", release_gil=True)
_ROWS_PER_TASK = 48  # rows of a picture that a thread computes at a time


def run(inputs: UpsampleMasksInputs) -> Masks:
    """As the reference, which also serves other dtypes and values that are no numbers."""
    logits, image, resized, size, offset, pixels = inputs
    if logits.dtype is not torch.float32 or not logits.numel() or not bool(logits.sum().isfinite()):
        return upsample_masks(inputs)
    logits = logits.contiguous()
    count, side = logits.shape[0], logits.shape[-1]
    width, height = size
    bands = -(-height // _ROWS_PER_TASK)
    masks = torch.empty(count, height, width, dtype=torch.bool) if pixels else None
    stats = torch.empty(count, bands, 7, dtype=torch.int64)
    _kernel()(
        None if masks is None else masks.data_ptr(), stats.data_ptr(), logits.data_ptr(), count,
        side, image,
        resized[0], resized[1], width, height, _ROWS_PER_TASK, 0.0 if offset is None else offset,
    )  # fmt: skip
    low, high, sums = stats[..., :2].amin(1), stats[..., 2:4].amax(1), stats[..., 4:].sum(1)
    boxes = torch.where(
        sums[:, :1] > 0, torch.cat((low, high), 1), torch.zeros(1, dtype=torch.int64)
    )
    steady = None if offset is None else sums[:, 1].float() / sums[:, 2].clamp(min=1)
    return masks, boxes, sums[:, 0], steady
