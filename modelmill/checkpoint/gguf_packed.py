"""GGUF's Q4_0, Q4_1 and Q8_0 taken apart without expanding them: blocks of 32 columns become groups of 32.

Q4_0: a float16 scale, 16 bytes; Q4_1: scale, minimum, 16 bytes; Q8_0: scale, 32 signed bytes. Of the 4-bit formats
byte j holds column j in its low half and column j + 16 in its high half. The other formats have scales of scales.
"""

from __future__ import annotations

import torch

from modelmill.checkpoint.container import TensorInfo
from modelmill.checkpoint.packed import Form, Packed

BLOCK = 32
BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}


def form_of(info: TensorInfo, *, transposed: bool) -> Form | None:
    """The form of a matrix [rows, columns] in GGUF's own orientation; None for other types and for vectors."""
    if info.dtype not in BITS or len(info.shape) != 2:
        return None
    rows, columns = info.shape
    return Form(
        label=info.dtype,
        bits=BITS[info.dtype],
        rows=rows,
        columns=columns,
        group=BLOCK,
        offset=info.dtype == "Q4_1",
        grid=torch.float16,
        transposed=transposed,
    )


def packed_of(kind: str, blocks: torch.Tensor) -> Packed:
    """blocks: uint8 [N, K/32, bytes]."""
    scale, at = _halves(blocks, 0), 2
    offset = None
    if kind == "Q4_1":
        offset, at = _halves(blocks, 2), 4
    codes = blocks[:, :, at:].contiguous()
    if BITS[kind] == 8:
        return Packed(codes.view(torch.int8).flatten(1), scale, None)
    return Packed(torch.cat([codes & 15, codes >> 4], -1).flatten(1), scale, offset)


def _halves(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at a byte of each block, [N, G]."""
    return blocks[:, :, at : at + 2].contiguous().view(torch.float16)[:, :, 0].contiguous()
