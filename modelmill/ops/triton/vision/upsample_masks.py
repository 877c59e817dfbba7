"""Masks upsampled and measured in one pass: a pixel is a weighted sum of 4 × 4 logits.

Computes: masks, boxes, areas and stability counts from logits[count, side, side] by two bilinear
    interpolations in one
Dtypes: logits float32; float64 sums
Layout: row-major
Range: any M
Technique: separable 4 × 4 taps, one pass
Ops: upsample_masks

Both steps of upsampling are separable, so together they are four taps and four weights per row and
per column of the image. Sums are float64, so that no pixel falls on the wrong side of 0.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from modelmill.ops.triton.common.device import unavailable_reason_for_portable_kernel
from modelmill.ops.upsample_masks import Masks, UpsampleMasksInputs

unavailable_reason = unavailable_reason_for_portable_kernel

ROWS, BLOCK = 32, 512  # pixels per program
_INITIAL_BOX_MINIMUM = 1 << 30


def supports(inputs: UpsampleMasksInputs) -> bool:
    """Contiguous float32."""
    logits = inputs.logits
    return logits.dtype == torch.float32 and logits.is_contiguous() and logits.numel() > 0


def run(inputs: UpsampleMasksInputs) -> Masks:
    """Compute the op with the Triton kernel; same contract as the reference."""
    logits, image, resized, size, offset, pixels = inputs
    count, grid, _ = logits.shape
    width, height = size
    columns, column_weights = _interpolation_taps(width, resized[0], image, grid, logits.device)
    rows, row_weights = _interpolation_taps(height, resized[1], image, grid, logits.device)
    counts = torch.zeros((count, 3), dtype=torch.int32, device=logits.device)
    boxes = torch.full((count, 4), _INITIAL_BOX_MINIMUM, dtype=torch.int32, device=logits.device)
    boxes[:, 2:] = -1
    masks = (
        torch.empty((count, height, width), dtype=torch.bool, device=logits.device)
        if pixels
        else None
    )
    _upsample_kernel[(count, -(-height // ROWS), -(-width // BLOCK))](
        logits, columns, column_weights, rows, row_weights, counts, boxes,
        counts if masks is None else masks.view(torch.int8), grid, width, height, offset or 0.0,
        STABILITY=offset is not None, PIXELS=pixels, ROWS=ROWS, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    boxes = torch.where(boxes[:, 2:3] >= 0, boxes, 0).long()
    stability = None if offset is None else counts[:, 1] / counts[:, 2].clamp(min=1)
    return masks, boxes, counts[:, 0].long(), stability


@functools.lru_cache(maxsize=32)
def _interpolation_taps(
    out: int, resized: int, image: int, grid: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices [out, 4] of the four taps of each of ``out`` pixels along an axis, and weights."""
    near, far, far_weight = _bilinear_taps(out, resized)
    low, high, high_weight = _bilinear_taps(image, grid)
    places = torch.stack((low[near], high[near], low[far], high[far]), 1)
    weights = torch.stack(
        (
            (1 - far_weight) * (1 - high_weight[near]), (1 - far_weight) * high_weight[near],
            far_weight * (1 - high_weight[far]), far_weight * high_weight[far],
        ),
        1,
    )  # fmt: skip
    return places.int().to(device), weights.to(device)


def _bilinear_taps(out: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bilinear upsampling of one axis (align_corners=False).

    Returns:
        (index of the first neighbour, index of the second, weight of the second).
    """
    position = ((torch.arange(out, dtype=torch.float64) + 0.5) * (size / out) - 0.5).clamp(min=0)
    near = position.long().clamp(max=size - 1)
    return near, (near + 1).clamp(max=size - 1), position - near


@triton.jit(do_not_specialize=["width", "height", "offset"])
def _upsample_kernel(
    logits_ptr, column_ptr, column_weight_ptr, row_ptr, row_weight_ptr, counts_ptr, boxes_ptr,
    masks_ptr,
    grid, width, height, offset, STABILITY: tl.constexpr, PIXELS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    mask = tl.program_id(0).to(tl.int64)
    top = tl.program_id(1) * ROWS
    x = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = x < width
    base = logits_ptr + mask * grid * grid
    a, wa = _load_tap(column_ptr, column_weight_ptr, x, 0, inside)
    b, wb = _load_tap(column_ptr, column_weight_ptr, x, 1, inside)
    c, wc = _load_tap(column_ptr, column_weight_ptr, x, 2, inside)
    d, wd = _load_tap(column_ptr, column_weight_ptr, x, 3, inside)
    area = tl.zeros([BLOCK], tl.int32)
    high = tl.zeros([BLOCK], tl.int32)
    low = tl.zeros([BLOCK], tl.int32)
    first = tl.full([BLOCK], 1 << 30, tl.int32)
    last = tl.full([BLOCK], -1, tl.int32)
    for y in range(top, tl.minimum(top + ROWS, height)):
        value = tl.zeros([BLOCK], tl.float64)
        for part in tl.static_range(4):
            row = base + tl.load(row_ptr + y * 4 + part) * grid
            line = (
                _load_float64(row + a) * wa
                + _load_float64(row + b) * wb
                + _load_float64(row + c) * wc
                + _load_float64(row + d) * wd
            )
            value += line * tl.load(row_weight_ptr + y * 4 + part)
        hit = inside & (value > 0)
        area += hit.to(tl.int32)
        if STABILITY:
            high += (inside & (value > offset)).to(tl.int32)
            low += (inside & (value > -offset)).to(tl.int32)
        if PIXELS:
            tl.store(masks_ptr + (mask * height + y) * width + x, hit.to(tl.int8), mask=inside)
        first = tl.minimum(first, tl.where(hit, y, 1 << 30))
        last = tl.maximum(last, tl.where(hit, y, -1))
    counts_ptr += mask * 3
    tl.atomic_add(counts_ptr, tl.sum(area, 0))
    if STABILITY:
        tl.atomic_add(counts_ptr + 1, tl.sum(high, 0))
        tl.atomic_add(counts_ptr + 2, tl.sum(low, 0))
    boxes_ptr += mask * 4
    tl.atomic_min(boxes_ptr, tl.min(tl.where(area > 0, x, 1 << 30), 0))
    tl.atomic_min(boxes_ptr + 1, tl.min(first, 0))
    tl.atomic_max(boxes_ptr + 2, tl.max(tl.where(area > 0, x, -1), 0))
    tl.atomic_max(boxes_ptr + 3, tl.max(last, 0))


@triton.jit
def _load_float64(at):
    return tl.load(at).to(tl.float64)


@triton.jit
def _load_tap(place_ptr, weight_ptr, x, part: tl.constexpr, inside):
    place = tl.load(place_ptr + x * 4 + part, mask=inside, other=0)
    return place, tl.load(weight_ptr + x * 4 + part, mask=inside, other=0.0)
