"""GGUF's Q4_0, Q4_1, Q8_0 and MXFP4 without expansion: blocks of 32 columns become groups of 32.

Q4_0: a float16 scale, 16 bytes; Q4_1: scale, minimum, 16 bytes; Q8_0: scale, 32 signed bytes;
MXFP4: an exponent of one byte, 16 bytes. In the 4-bit formats byte j holds column j in its low half
and column j + 16 in its high half. The other formats have scales of scales.
"""

from __future__ import annotations

import torch

from modelmill.checkpoint.container import TensorInfo
from modelmill.checkpoint.quant_layout import QuantizedMatrix, QuantLayout

BLOCK_COLUMNS = 32
BITS_BY_TYPE = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8, "MXFP4": 4}


def gguf_quant_layout(info: TensorInfo, *, transposed: bool) -> QuantLayout | None:
    """Return the layout of a matrix [rows, columns] in GGUF's own orientation.

    It is None for other types and for vectors.
    """
    if info.dtype not in BITS_BY_TYPE or len(info.shape) != 2:
        return None
    rows, columns = info.shape
    return QuantLayout(
        label=info.dtype,
        bits=BITS_BY_TYPE[info.dtype],
        rows=rows,
        columns=columns,
        group_size=BLOCK_COLUMNS,
        has_offset=info.dtype == "Q4_1",
        scale_dtype=torch.uint8 if info.dtype == "MXFP4" else torch.float16,
        transposed=transposed,
    )


def unpack_gguf_blocks(type_name: str, blocks: torch.Tensor) -> QuantizedMatrix:
    """Unpack blocks uint8 [N, K/32, bytes]."""
    if type_name == "MXFP4":
        scale, at = blocks[:, :, 0].contiguous(), 1
    else:
        scale, at = _read_float16(blocks, 0), 2
    offset = None
    if type_name == "Q4_1":
        offset, at = _read_float16(blocks, 2), 4
    codes = blocks[:, :, at:].contiguous()
    if BITS_BY_TYPE[type_name] == 8:
        return QuantizedMatrix(codes.view(torch.int8).flatten(1), scale, None)
    return QuantizedMatrix(torch.cat([codes & 15, codes >> 4], -1).flatten(1), scale, offset)


def _read_float16(blocks: torch.Tensor, byte_offset: int) -> torch.Tensor:
    """Return the float16 at a byte of each block, [N, G]."""
    return (
        blocks[:, :, byte_offset : byte_offset + 2]
        .contiguous()
        .view(torch.float16)[:, :, 0]
        .contiguous()
    )
