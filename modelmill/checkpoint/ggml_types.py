"""The ggml number formats: block sizes, and expansion of the block formats to float32.

A block format stores `block_values` consecutive values of a row in `block_bytes` bytes: one or two
scales and the values in 2 to 8 bits. The layouts are those of ggml (gguf-py's `gguf.quants` is the
independent reference of the tests). Every function takes blocks as uint8 [n, block_bytes] and
returns float32 [n, block_values].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

CHUNK_VALUES = 1 << 22
"""Values expanded at a time, so that intermediates are small compared with the tensor."""

DequantizeBlocks = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class GgmlType:
    """One ggml type: `block_values` values take `block_bytes` bytes.

    Attributes:
        dtype: the torch dtype that stores it unchanged, or None for block formats.
        dequantize: blocks -> float32; None for plain types and for unsupported formats.
    """

    name: str
    block_values: int
    block_bytes: int
    dtype: torch.dtype | None = None
    dequantize: DequantizeBlocks | None = None

    @property
    def label(self) -> str:
        """Return the torch name of a plain type ("float16") or the ggml name ("Q4_1")."""
        return str(self.dtype).removeprefix("torch.") if self.dtype is not None else self.name

    @property
    def is_supported(self) -> bool:
        """Return whether this type can be dequantized."""
        return self.dtype is not None or self.dequantize is not None


def dequantize_ggml_blocks(ggml_type: GgmlType, data: torch.Tensor, out: torch.Tensor) -> None:
    """Dequantize `data` (uint8, flat, whole blocks) into `out` (float32, flat), by chunks."""
    assert ggml_type.dequantize is not None, ggml_type.name
    blocks, values = data.view(-1, ggml_type.block_bytes), out.view(-1, ggml_type.block_values)
    step = max(1, CHUNK_VALUES // ggml_type.block_values)
    for start in range(0, blocks.shape[0], step):
        values[start : start + step] = ggml_type.dequantize(blocks[start : start + step])


def _unpack_bits(data: torch.Tensor, width: int, bits: int) -> torch.Tensor:
    """Unpack bit fields: uint8 [n, k] -> uint8 [n, k * 8 / bits].

    Bytes are in groups of `width`; of each group first the lowest field of every byte, then the
    next one.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    groups = data.reshape(data.shape[0], -1, 1, width)
    return ((groups >> shifts.view(1, 1, -1, 1)) & ((1 << bits) - 1)).flatten(1)


def _read_float16(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return the float16 at byte `start` of each block, as float32 [n, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _int8_bytes_to_float(data: torch.Tensor) -> torch.Tensor:
    return data.contiguous().view(torch.int8).float()


def _dequantize_q4_0(b: torch.Tensor) -> torch.Tensor:
    return _read_float16(b, 0) * (_unpack_bits(b[:, 2:], 16, 4).float() - 8)


def _dequantize_q4_1(b: torch.Tensor) -> torch.Tensor:
    return _read_float16(b, 0) * _unpack_bits(b[:, 4:], 16, 4).float() + _read_float16(b, 2)


def _unpack_5bit_values(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return 32 values of 5 bits: four bytes of fifth bits in order, 16 bytes of low halves."""
    return (_unpack_bits(low, 16, 4) | (_unpack_bits(high, 1, 1) << 4)).float()


def _dequantize_q5_0(b: torch.Tensor) -> torch.Tensor:
    return _read_float16(b, 0) * (_unpack_5bit_values(b[:, 2:6], b[:, 6:]) - 16)


def _dequantize_q5_1(b: torch.Tensor) -> torch.Tensor:
    return _read_float16(b, 0) * _unpack_5bit_values(b[:, 4:8], b[:, 8:]) + _read_float16(b, 2)


def _dequantize_q8_0(b: torch.Tensor) -> torch.Tensor:
    return _read_float16(b, 0) * _int8_bytes_to_float(b[:, 2:])


def _split_groups(values: torch.Tensor, count: int) -> torch.Tensor:
    """Split [n, 256] into [n, count, 256 / count]: a super-block's groups with their own scales."""
    return values.reshape(values.shape[0], count, -1)


def _dequantize_q2_k(b: torch.Tensor) -> torch.Tensor:
    scales, quants = b[:, :16], _split_groups(_unpack_bits(b[:, 16:80], 32, 2).float(), 16)
    scale = _read_float16(b, 80) * (scales & 15).float()
    low = _read_float16(b, 82) * (scales >> 4).float()
    return (scale[..., None] * quants - low[..., None]).flatten(1)


def _dequantize_q3_k(b: torch.Tensor) -> torch.Tensor:
    high, low = _unpack_bits(b[:, :32], 32, 1).float(), _unpack_bits(b[:, 32:96], 32, 2).float()
    quants = _split_groups(low - 4 * (1 - high), 16)
    # 16 scales of 6 bits: low halves in 8 bytes, the two high bits of all in the last 4.
    six = _unpack_bits(b[:, 96:104], 8, 4) | (_unpack_bits(b[:, 104:108], 4, 2) << 4)
    scale = _read_float16(b, 108) * (six.float() - 32)
    return (scale[..., None] * quants).flatten(1)


def _k_quant_scales_and_mins(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and minima [n, 8, 1] of Q4_K and Q5_K: 6 bits each in 12 bytes."""
    first, second, mixed = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = torch.cat((first & 63, (mixed & 15) | ((first >> 2) & 48)), dim=1)
    lows = torch.cat((second & 63, (mixed >> 4) | ((second >> 2) & 48)), dim=1)
    return (_read_float16(b, 0) * scales.float())[..., None], (_read_float16(b, 2) * lows.float())[
        ..., None
    ]


def _dequantize_q4_k(b: torch.Tensor) -> torch.Tensor:
    scale, low = _k_quant_scales_and_mins(b)
    return (scale * _split_groups(_unpack_bits(b[:, 16:], 32, 4).float(), 8) - low).flatten(1)


def _dequantize_q5_k(b: torch.Tensor) -> torch.Tensor:
    scale, low = _k_quant_scales_and_mins(b)
    quants = _unpack_bits(b[:, 48:], 32, 4) | (_unpack_bits(b[:, 16:48], 32, 1) << 4)
    return (scale * _split_groups(quants.float(), 8) - low).flatten(1)


def _dequantize_q6_k(b: torch.Tensor) -> torch.Tensor:
    quants = _unpack_bits(b[:, :128], 64, 4) | (_unpack_bits(b[:, 128:192], 32, 2) << 4)
    scale = _read_float16(b, 208) * _int8_bytes_to_float(b[:, 192:208])
    return (scale[..., None] * _split_groups(quants.float() - 32, 16)).flatten(1)


def _dequantize_mxfp4(b: torch.Tensor) -> torch.Tensor:
    codes = _unpack_bits(b[:, 1:], 16, 4)
    positive = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat((positive, -positive))[codes.long()]
    return torch.ldexp(values, b[:, :1].int() - 127)


def _dequantize_q8_k(b: torch.Tensor) -> torch.Tensor:
    return b[:, :4].contiguous().view(torch.float32) * _int8_bytes_to_float(b[:, 4:260])


_SIZES_OF_UNREADABLE_TYPES = {
    9: ("Q8_1", 32, 36), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}  # fmt: skip
GGML_TYPES: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4, torch.float32),
    1: GgmlType("F16", 1, 2, torch.float16),
    2: GgmlType("Q4_0", 32, 18, dequantize=_dequantize_q4_0),
    3: GgmlType("Q4_1", 32, 20, dequantize=_dequantize_q4_1),
    6: GgmlType("Q5_0", 32, 22, dequantize=_dequantize_q5_0),
    7: GgmlType("Q5_1", 32, 24, dequantize=_dequantize_q5_1),
    8: GgmlType("Q8_0", 32, 34, dequantize=_dequantize_q8_0),
    10: GgmlType("Q2_K", 256, 84, dequantize=_dequantize_q2_k),
    11: GgmlType("Q3_K", 256, 110, dequantize=_dequantize_q3_k),
    12: GgmlType("Q4_K", 256, 144, dequantize=_dequantize_q4_k),
    13: GgmlType("Q5_K", 256, 176, dequantize=_dequantize_q5_k),
    14: GgmlType("Q6_K", 256, 210, dequantize=_dequantize_q6_k),
    15: GgmlType("Q8_K", 256, 292, dequantize=_dequantize_q8_k),
    24: GgmlType("I8", 1, 1, torch.int8),
    25: GgmlType("I16", 1, 2, torch.int16),
    26: GgmlType("I32", 1, 4, torch.int32),
    27: GgmlType("I64", 1, 8, torch.int64),
    28: GgmlType("F64", 1, 8, torch.float64),
    30: GgmlType("BF16", 1, 2, torch.bfloat16),
    39: GgmlType("MXFP4", 32, 17, dequantize=_dequantize_mxfp4),
    **{number: GgmlType(*sizes) for number, sizes in _SIZES_OF_UNREADABLE_TYPES.items()},
}
"""By the number in a GGUF file.

Types that cannot be expanded are listed so that errors can name them.
"""
