"""Weight-only int4: 16 levels a group of columns (128, 64 or 32), activations untouched.

Stored are the packed codes, a float16 scale and (unless symmetric) a float16 offset for every row
and group, and two numbers that the shapes do not tell: K and the group. ops/int4_linear.py tells
the layout. Where a checkpoint's groups are of scattered columns, the columns are held group by
group and their order is stored too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from modelmill.ops.groupwise import PACK_COLUMNS, expand_groups
from modelmill.ops.int4_linear import (
    ZERO_POINT,
    dequantize_weight,
    pack_codes,
    packed_bytes,
    unpack_codes,
)
from modelmill.ops.registry import Ops
from modelmill.weights._groupwise import GroupwiseWeight, PackedInfo, apply_perm
from modelmill.weights.base import UnpackSpec

DEFAULT_GROUP_SIZE = 128


def resolve_group_size(group_size: int, columns: int) -> int:
    """The columns that share a scale: ``group_size``, or for −1 (per channel) the whole row in runs
    of 32.
    """
    return -(-columns // PACK_COLUMNS) * PACK_COLUMNS if group_size == -1 else group_size


@dataclass(frozen=True)
class Int4Weight(GroupwiseWeight):
    """weight: [N, ⌈K/32⌉·16] uint8; offset None: −8 · scale is meant."""

    format: str = "int4"

    CODE_DTYPE: ClassVar[torch.dtype] = torch.uint8
    UNPACKS: ClassVar[UnpackSpec] = UnpackSpec("int4_linear", torch.float32)

    @staticmethod
    def pack(
        weight: torch.Tensor,
        dtype: torch.dtype,  # noqa: ARG004  the same for every dtype
        *,
        group_size: int = DEFAULT_GROUP_SIZE,
        symmetric: bool = False,
    ) -> Int4Weight:
        """Round to nearest on grids that span each group's range."""
        wide = weight.float()
        group_size = resolve_group_size(group_size, wide.shape[1])
        scale, offset = _minmax_grid(wide, group_size, symmetric)
        step, start = (
            expand_groups(t, group_size, wide.shape[1], wide.dtype) for t in (scale, offset)
        )
        codes = torch.round((wide - start) / step).clamp_(0, 15)
        return Int4Weight.from_codes(codes, scale, None if symmetric else offset, group_size)

    @staticmethod
    def from_codes(
        codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None, group_size: int
    ) -> Int4Weight:
        """codes: [N, K] whole numbers 0…15; scale, offset: [N, G] whose values float16 holds
        exactly.
        """
        halves = None if offset is None else offset.half()
        return Int4Weight(pack_codes(codes), scale.half(), halves, codes.shape[1], group_size)

    @staticmethod
    def packed_info(
        shape: tuple[int, int],
        dtype: torch.dtype,  # noqa: ARG004
        *,
        group_size: int = DEFAULT_GROUP_SIZE,
        symmetric: bool = False,
    ) -> PackedInfo:
        wide = max(resolve_group_size(group_size, shape[1]), 1)
        return Int4Weight.stored_info(
            shape, wide, torch.float16, has_offset=not symmetric, has_perm=False
        )

    @staticmethod
    def row_width(columns: int) -> int:
        return packed_bytes(columns)

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor:
        return ops.int4_linear(
            apply_perm(x, self.perm), self.weight, self.scale, self.offset, self.group_size, bias
        )

    def try_linear_swiglu(
        self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops
    ) -> torch.Tensor | None:
        if ops.int4_linear_swiglu is None:
            return None
        return ops.int4_linear_swiglu(
            apply_perm(x, self.perm), self.weight, self.scale, self.offset, self.group_size, bias
        )

    def codes(self) -> torch.Tensor:
        """[N, K] uint8, columns as held."""
        return unpack_codes(self.weight, self.columns)

    def _dequantize(self) -> torch.Tensor:
        return dequantize_weight(
            self.weight, self.scale, self.offset, self.group_size, self.columns
        )


def _minmax_grid(
    weight: torch.Tensor, group_size: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """scale, offset [N, G] float32 holding float16 values; a scale of 0 becomes 1."""
    parts = weight.split(group_size, 1)
    low = torch.stack([p.amin(1) for p in parts], 1)
    high = torch.stack([p.amax(1) for p in parts], 1)
    if symmetric:  # 8 levels below zero and 7 above: the longer side gets the eighth
        scale = torch.where(-low > high, -low, -high) / ZERO_POINT
    else:
        # a tensor: by a bare number GPUs divide with its reciprocal, and the last bit would depend
        # on the machine
        scale = (high - low) / torch.full_like(high, 15)
    scale = scale.half().float()
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return scale, -ZERO_POINT * scale if symmetric else low.half().float()
