"""What weights may be rounded to, and the walk through a block of columns that rounds them one
after another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from modelmill.ops.quant_types import round_to_dtype
from modelmill.quant.group_grid import INT4_LEVELS, to_codes

BLOCK_COLUMNS = 128
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class RoundingGrid:
    """scale, offset: [N, K] float32, a grid of ``num_levels``; offset None: e4m3 times scale."""

    scale: torch.Tensor
    offset: torch.Tensor | None = None
    num_levels: int = INT4_LEVELS

    def permute_columns(self, perm: torch.Tensor) -> RoundingGrid:
        """Columns in another order [K]."""
        offset = None if self.offset is None else self.offset[:, perm]
        return replace(self, scale=self.scale[:, perm], offset=offset)

    def to(self, device: str) -> RoundingGrid:
        """The same on a device."""
        return replace(
            self,
            scale=self.scale.to(device),
            offset=None if self.offset is None else self.offset.to(device),
        )

    def round_column(self, column: torch.Tensor, j: int) -> torch.Tensor:
        """[N], values at column j, to what they are rounded to."""
        scale = self.scale[:, j]
        if self.offset is None:
            return round_to_dtype(column / scale, E4M3).float() * scale
        return (
            to_codes(column, scale, self.offset[:, j], self.num_levels) * scale + self.offset[:, j]
        )

    def quantize(self, values: torch.Tensor) -> torch.Tensor:
        """[N, K], the codes of values that are on the grid."""
        assert self.offset is not None, "a grid of levels"
        return to_codes(values, self.scale, self.offset, self.num_levels)

    def round_columns(
        self,
        work: torch.Tensor,
        matrix: torch.Tensor,
        first: int,
        last: int,
        values: torch.Tensor,
        *,
        refine: bool,
    ) -> torch.Tensor:
        """Round the columns first … last of ``work`` [N, K] into ``values``; returns what each
        passes on, [N, width].

        Not ``refine``: ``work`` are weights, matrix [K, K] is the factor of H⁻¹, and a column
        passes its error on. refine: ``work`` is what pulls at each column of ``values``, matrix is
        H, and a column that is rounded to where the pull says passes its change on. Both happen
        inside the block here, behind it by the caller.
        """
        passed = torch.empty(len(work), last - first, device=work.device)
        kernel = _gptq_columns_kernel(work.device.type)
        if kernel is not None and (self.offset is not None or kernel.supports_fp8(work.device)):
            kernel.run(
                work,
                matrix,
                first,
                self.scale,
                self.offset,
                self.num_levels,
                values,
                passed,
                refine,
            )
            return passed
        mine, inner = work[:, first:last], matrix[first:last, first:last]
        for j in range(last - first):
            column, by = mine[:, j], inner[j, j]
            before = values[:, first + j].clone() if refine else column
            values[:, first + j] = self.round_column(
                before + column / by if refine else column, first + j
            )
            passed[:, j] = before - values[:, first + j]
            if refine:
                mine += passed[:, j, None] * inner[j]
            else:
                passed[:, j] /= by
                mine[:, j:] -= passed[:, j, None] * inner[j, j:]
        return passed


def _gptq_columns_kernel(device_type: str) -> Any:
    """The module that walks on a GPU; None where there is none."""
    if device_type != "cuda":
        return None
    try:
        from modelmill.ops.triton import gptq_columns
    except ImportError:
        return None
    return gptq_columns if gptq_columns.available(device_type) is None else None
