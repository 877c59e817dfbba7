"""The values that weights may be rounded to, and the column-by-column rounding of GPTQ."""

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
    """The grid of every weight.

    Attributes:
        scale: [N, K] float32.
        offset: [N, K] float32; None: e4m3 times scale.
        num_levels: levels of the grid.
    """

    scale: torch.Tensor
    offset: torch.Tensor | None = None
    num_levels: int = INT4_LEVELS

    def permute_columns(self, perm: torch.Tensor) -> RoundingGrid:
        """Return the grid with its columns permuted [K]."""
        offset = None if self.offset is None else self.offset[:, perm]
        return replace(self, scale=self.scale[:, perm], offset=offset)

    def to(self, device: str) -> RoundingGrid:
        """Return a copy on the device."""
        return replace(
            self,
            scale=self.scale.to(device),
            offset=None if self.offset is None else self.offset.to(device),
        )

    def round_column(self, column: torch.Tensor, j: int) -> torch.Tensor:
        """Round [N] values at column j."""
        scale = self.scale[:, j]
        if self.offset is None:
            return round_to_dtype(column / scale, E4M3).float() * scale
        return (
            to_codes(column, scale, self.offset[:, j], self.num_levels) * scale + self.offset[:, j]
        )

    def quantize(self, values: torch.Tensor) -> torch.Tensor:
        """Return the codes of values [N, K] that are on the grid."""
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
        """Round columns first … last of ``work`` [N, K] into ``values``.

        Without refine, ``work`` are weights, matrix [K, K] is the factor of H⁻¹, and the error of a
        column is compensated in later ones. With refine, ``work`` is the gradient at each column of
        ``values``, matrix is H, and the change of a column is propagated. Here both happen inside
        the block; the caller updates the columns behind it.

        Returns:
            What each column propagates, [N, width].
        """
        propagated = torch.empty(len(work), last - first, device=work.device)
        kernel = _load_gptq_columns(work.device.type)
        if kernel is not None and (self.offset is not None or kernel.supports_fp8(work.device)):
            kernel.run(
                work,
                matrix,
                first,
                self.scale,
                self.offset,
                self.num_levels,
                values,
                propagated,
                refine,
            )
            return propagated
        block, inner = work[:, first:last], matrix[first:last, first:last]
        for j in range(last - first):
            column, diagonal = block[:, j], inner[j, j]
            before = values[:, first + j].clone() if refine else column
            values[:, first + j] = self.round_column(
                before + column / diagonal if refine else column, first + j
            )
            propagated[:, j] = before - values[:, first + j]
            if refine:
                block += propagated[:, j, None] * inner[j]
            else:
                propagated[:, j] /= diagonal
                block[:, j:] -= propagated[:, j, None] * inner[j, j:]
        return propagated


def _load_gptq_columns(device_type: str) -> Any:
    """Return the module of the GPU kernel, or None without one."""
    if device_type != "cuda":
        return None
    try:
        from modelmill.ops.triton.norm_quantize import gptq_columns
    except ImportError:
        return None
    return gptq_columns if gptq_columns.available(device_type) is None else None
