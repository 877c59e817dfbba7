"""Weight-only int4: 16 levels per group of columns (128, 64 or 32), float activations.

Stored are the packed codes, a float16 scale and (unless symmetric) a float16 offset for every row
and group, and two numbers that the shapes do not determine: K and the group size.
ops/int4_linear.py describes the layout. If a checkpoint's groups contain scattered columns
(act-order), the columns are stored group by group together with their permutation.
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
    packed_row_bytes,
    unpack_codes,
)
from modelmill.ops.registry import Ops
from modelmill.weights._groupwise import GroupwiseWeight
from modelmill.weights.base import PackedTensorSpecs, UpcastSpec

DEFAULT_GROUP_SIZE = 128


def resolve_group_size(group_size: int, columns: int) -> int:
    """Return the columns that share a scale.

    That is ``group_size``, or for −1 (per channel) the whole row, rounded up to a multiple of 32.
    """
    return -(-columns // PACK_COLUMNS) * PACK_COLUMNS if group_size == -1 else group_size


@dataclass(frozen=True)
class Int4Weight(GroupwiseWeight):
    """A matrix of packed 4-bit codes.

    Attributes:
        weight: [N, ⌈K/32⌉·16] uint8.
        offset: None means −8 · scale.
    """

    format: str = "int4"

    CODE_DTYPE: ClassVar[torch.dtype] = torch.uint8
    UNPACKS: ClassVar[UpcastSpec] = UpcastSpec("int4_linear", torch.float32)

    @classmethod
    def pack(
        cls,
        weight: torch.Tensor,
        dtype: torch.dtype,  # noqa: ARG003  the same for every dtype
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
        """Build a weight from unpacked codes.

        Args:
            codes: [N, K] integers 0…15.
            scale: [N, G], exact in float16.
            offset: [N, G], exact in float16, or None.
            group_size: columns that share a scale.
            perm: column permutation or None.
        """
        halves = None if offset is None else offset.half()
        return Int4Weight(pack_codes(codes), scale.half(), halves, codes.shape[1], group_size)

    @classmethod
    def packed_tensor_specs(
        cls,
        shape: tuple[int, int],
        dtype: torch.dtype,  # noqa: ARG003
        *,
        group_size: int = DEFAULT_GROUP_SIZE,
        symmetric: bool = False,
    ) -> PackedTensorSpecs:
        """Return shape and dtype of each stored tensor, by suffix."""
        wide = max(resolve_group_size(group_size, shape[1]), 1)
        return Int4Weight.stored_tensor_specs(
            shape, wide, torch.float16, has_offset=not symmetric, has_perm=False
        )

    @staticmethod
    def packed_row_elements(columns: int) -> int:
        """Return the number of stored elements in a row of this many columns."""
        return packed_row_bytes(columns)

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor:
        """Multiply [T, K] by the weight and add the bias: [T, N]."""
        return self.run_bound_op(ops.int4_linear, self._linear_inputs(x, bias))

    def try_linear_swiglu(
        self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops
    ) -> torch.Tensor | None:
        """Compute the product and SwiGLU's gate in one op, or return None without such an op."""
        if ops.int4_linear_swiglu is None:
            return None
        return self.run_bound_op(ops.int4_linear_swiglu, self._linear_inputs(x, bias))

    def codes(self) -> torch.Tensor:
        """Return the codes [N, K] uint8, columns in stored order."""
        return unpack_codes(self.weight, self.columns)

    def _dequantize_in_stored_order(self) -> torch.Tensor:
        return dequantize_weight(
            self.weight, self.scale, self.offset, self.group_size, self.columns
        )


def _minmax_grid(
    weight: torch.Tensor, group_size: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and offset [N, G] as float32 with float16 values; a scale of 0 becomes 1."""
    parts = weight.split(group_size, 1)
    low = torch.stack([p.amin(1) for p in parts], 1)
    high = torch.stack([p.amax(1) for p in parts], 1)
    if symmetric:  # 8 levels below zero and 7 above: the side with the larger range gets the eighth
        scale = torch.where(-low > high, -low, -high) / ZERO_POINT
    else:
        # a tensor, because GPUs divide by a scalar with its reciprocal and the last bit would
        # depend on the device
        scale = (high - low) / torch.full_like(high, 15)
    scale = scale.half().float()
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return scale, -ZERO_POINT * scale if symmetric else low.half().float()
