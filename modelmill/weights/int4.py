"""Weight-only int4: 16 levels a group of columns (128, 64 or 32), activations untouched.

Stored are the packed codes, a float16 scale and (unless symmetric) a float16 offset for every row and group, and two
numbers that the shapes do not tell: K and the group. ops/int4_linear.py tells the layout. Where a checkpoint's groups
are of scattered columns, the columns are held group by group and their order is stored too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from modelmill.ops.groups import RUN, spread
from modelmill.ops.int4_linear import ZERO, codes_of, pack_codes, packed_bytes, unpacked
from modelmill.ops.shelf import Ops
from modelmill.weights._grouped import Grouped, Info, in_order
from modelmill.weights.held import Expansion

GROUP = 128


def columns_of(group: int, columns: int) -> int:
    """The columns that share a scale: ``group``, or for −1 (per channel) the whole row in runs of 32."""
    return -(-columns // RUN) * RUN if group == -1 else group


@dataclass(frozen=True)
class Held(Grouped):
    """weight: [N, ⌈K/32⌉·16] uint8; offset None: −8 · scale is meant."""

    kind: str = "int4"

    STORED: ClassVar[torch.dtype] = torch.uint8
    EXPANDS: ClassVar[Expansion] = Expansion("int4_linear", torch.float32)

    @staticmethod
    def pack(
        weight: torch.Tensor,
        dtype: torch.dtype,  # noqa: ARG004  the same for every dtype
        *,
        group: int = GROUP,
        symmetric: bool = False,
    ) -> Held:
        """Round to nearest on grids that span each group's range."""
        wide = weight.float()
        group = columns_of(group, wide.shape[1])
        scale, offset = _spanning(wide, group, symmetric)
        step, start = (spread(t, group, wide.shape[1], wide.dtype) for t in (scale, offset))
        codes = torch.round((wide - start) / step).clamp_(0, 15)
        return Held.from_codes(codes, scale, None if symmetric else offset, group)

    @staticmethod
    def from_codes(codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None, group: int) -> Held:
        """codes: [N, K] whole numbers 0…15; scale, offset: [N, G] whose values float16 holds exactly."""
        halves = None if offset is None else offset.half()
        return Held(pack_codes(codes), scale.half(), halves, codes.shape[1], group)

    @staticmethod
    def packed_info(
        shape: tuple[int, int],
        dtype: torch.dtype,  # noqa: ARG004
        *,
        group: int = GROUP,
        symmetric: bool = False,
    ) -> Info:
        wide = max(columns_of(group, shape[1]), 1)
        return Held.stored_info(shape, wide, torch.float16, offset=not symmetric, order=False)

    @staticmethod
    def row_width(columns: int) -> int:
        return packed_bytes(columns)

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor:
        return ops.int4_linear(in_order(x, self.order), self.weight, self.scale, self.offset, self.group, bias)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor | None:
        if ops.gated_int4_linear is None:
            return None
        return ops.gated_int4_linear(in_order(x, self.order), self.weight, self.scale, self.offset, self.group, bias)

    def codes(self) -> torch.Tensor:
        """[N, K] uint8, columns as held."""
        return codes_of(self.weight, self.columns)

    def _wide(self) -> torch.Tensor:
        return unpacked(self.weight, self.scale, self.offset, self.group, self.columns)


def _spanning(weight: torch.Tensor, group: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """scale, offset [N, G] float32 holding float16 values; a scale of 0 becomes 1."""
    parts = weight.split(group, 1)
    low = torch.stack([p.amin(1) for p in parts], 1)
    high = torch.stack([p.amax(1) for p in parts], 1)
    if symmetric:  # 8 levels below zero and 7 above: the longer side gets the eighth
        scale = torch.where(-low > high, -low, -high) / ZERO
    else:
        # a tensor: by a bare number GPUs divide with its reciprocal, and the last bit would depend on the machine
        scale = (high - low) / torch.full_like(high, 15)
    scale = scale.half().float()
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return scale, -ZERO * scale if symmetric else low.half().float()
