"""Weight-only 8 bits in groups of columns, as GGUF's Q8_0, GPTQ and compressed-tensors store them.

Weights are never quantized into this format: it stores the integers of a checkpoint. Stored are the
codes, a scale and (unless symmetric) an offset for every row and group, K and the group size, and
the permutation if columns were reordered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from modelmill.ops.groupwise import PACK_COLUMNS
from modelmill.ops.int8_group_linear import dequantize_weight, pad_codes
from modelmill.ops.registry import Ops
from modelmill.weights._groupwise import GroupwiseWeight
from modelmill.weights.base import UpcastSpec


@dataclass(frozen=True)
class Int8GroupWeight(GroupwiseWeight):
    """A matrix of 8-bit codes in groups.

    Attributes:
        weight: [N, ⌈K/32⌉·32] int8.
        offset: None means zero.
    """

    format: str = "int8_group"

    CODE_DTYPE: ClassVar[torch.dtype] = torch.int8
    UNPACKS: ClassVar[UpcastSpec] = UpcastSpec("int8_group_linear", torch.float32)

    @staticmethod
    def from_codes(
        codes: torch.Tensor,
        scale: torch.Tensor,
        offset: torch.Tensor | None,
        group_size: int,
        perm: torch.Tensor | None = None,
    ) -> Int8GroupWeight:
        """Build a weight from codes [N, K] int8."""
        return Int8GroupWeight(pad_codes(codes), scale, offset, codes.shape[1], group_size, perm)

    @staticmethod
    def packed_row_elements(columns: int) -> int:
        """Return the number of stored elements in a row of this many columns."""
        return -(-columns // PACK_COLUMNS) * PACK_COLUMNS

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor:
        """Multiply [T, K] by the weight and add the bias: [T, N]."""
        return self.run_bound_op(ops.int8_group_linear, self._linear_inputs(x, bias))

    def codes(self) -> torch.Tensor:
        """Return the codes [N, K] int8, columns in stored order."""
        return self.weight[:, : self.columns]

    def _dequantize_in_stored_order(self) -> torch.Tensor:
        return dequantize_weight(
            self.weight, self.scale, self.offset, self.group_size, self.columns
        )
