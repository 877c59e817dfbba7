"""MXFP4 as checkpoints store it (gpt-oss): 4-bit floats in blocks of 32 with a scale of 8 bits.

Weights are never quantized into this format. ops/mxfp4_linear.py describes the numbers. Stored are
the packed codes, the scales' codes, and K with the block size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from modelmill.ops.int4_linear import pack_codes, packed_row_bytes, unpack_codes
from modelmill.ops.mxfp4_linear import BLOCK_COLUMNS, dequantize_weight
from modelmill.ops.registry import Ops
from modelmill.weights._groupwise import GroupwiseWeight
from modelmill.weights.base import UpcastSpec


@dataclass(frozen=True)
class Mxfp4Weight(GroupwiseWeight):
    """A matrix of packed E2M1 codes.

    Attributes:
        weight: [N, ⌈K/32⌉·16] uint8.
        scale: [N, ⌈K/32⌉] uint8, E8M0.
        offset: None.
    """

    format: str = "mxfp4"

    CODE_DTYPE: ClassVar[torch.dtype] = torch.uint8
    SCALE_DTYPES: ClassVar[tuple[torch.dtype, ...]] = (torch.uint8,)
    UNPACKS: ClassVar[UpcastSpec] = UpcastSpec("mxfp4_linear", torch.float32)

    @staticmethod
    def from_codes(codes: torch.Tensor, scale: torch.Tensor) -> Mxfp4Weight:
        """Build a weight from codes [N, K] of E2M1 and scales [N, K/32] of E8M0."""
        return Mxfp4Weight(pack_codes(codes), scale, None, codes.shape[1], BLOCK_COLUMNS)

    @staticmethod
    def packed_row_elements(columns: int) -> int:
        """Return the number of stored elements in a row of this many columns."""
        return packed_row_bytes(columns)

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor:
        """Multiply [T, K] by the weight and add the bias: [T, N]."""
        return self.run_bound_op(ops.mxfp4_linear, self._linear_inputs(x, bias))

    def codes(self) -> torch.Tensor:
        """Return the codes [N, K] uint8."""
        return unpack_codes(self.weight, self.columns)

    def _dequantize_in_stored_order(self) -> torch.Tensor:
        return dequantize_weight(self.weight, self.scale, None, self.group_size, self.columns)
