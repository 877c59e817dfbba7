"""What weights may be rounded to, and the walk through a block of columns that rounds them one after another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from modelmill.ops.eight_bit import rounded
from modelmill.quant.grid import LEVELS, to_codes

BLOCK = 128
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Steps:
    """scale, offset: [N, K] float32, a grid of ``levels``; offset None: e4m3 times scale."""

    scale: torch.Tensor
    offset: torch.Tensor | None = None
    levels: int = LEVELS

    def ordered(self, order: torch.Tensor) -> Steps:
        """Columns in another order [K]."""
        offset = None if self.offset is None else self.offset[:, order]
        return replace(self, scale=self.scale[:, order], offset=offset)

    def to(self, device: str) -> Steps:
        """The same on a device."""
        return replace(
            self, scale=self.scale.to(device), offset=None if self.offset is None else self.offset.to(device)
        )

    def nearest(self, column: torch.Tensor, j: int) -> torch.Tensor:
        """[N], values at column j, to what they are rounded to."""
        scale = self.scale[:, j]
        if self.offset is None:
            return rounded(column / scale, E4M3).float() * scale
        return to_codes(column, scale, self.offset[:, j], self.levels) * scale + self.offset[:, j]

    def codes(self, values: torch.Tensor) -> torch.Tensor:
        """[N, K], the codes of values that are on the grid."""
        assert self.offset is not None, "a grid of levels"
        return to_codes(values, self.scale, self.offset, self.levels)

    def walk(
        self, work: torch.Tensor, matrix: torch.Tensor, first: int, last: int, values: torch.Tensor, *, anew: bool
    ) -> torch.Tensor:
        """Round the columns first … last of ``work`` [N, K] into ``values``; returns what each passes on, [N, width].

        Not ``anew``: ``work`` are weights, matrix [K, K] is the factor of H⁻¹, and a column passes its error on. anew:
        ``work`` is what pulls at each column of ``values``, matrix is H, and a column that is rounded to where the
        pull says passes its change on. Both happen inside the block here, behind it by the caller.
        """
        passed = torch.empty(len(work), last - first, device=work.device)
        kernel = _kernel(work.device.type)
        if kernel is not None and (self.offset is not None or kernel.knows_fp8(work.device)):
            kernel.run(work, matrix, first, self.scale, self.offset, self.levels, values, passed, anew)
            return passed
        mine, inner = work[:, first:last], matrix[first:last, first:last]
        for j in range(last - first):
            column, by = mine[:, j], inner[j, j]
            before = values[:, first + j].clone() if anew else column
            values[:, first + j] = self.nearest(before + column / by if anew else column, first + j)
            passed[:, j] = before - values[:, first + j]
            if anew:
                mine += passed[:, j, None] * inner[j]
            else:
                passed[:, j] /= by
                mine[:, j:] -= passed[:, j, None] * inner[j, j:]
        return passed


def _kernel(device: str) -> Any:
    """The module that walks on a GPU; None where there is none."""
    if device != "cuda":
        return None
    try:
        from modelmill.ops.triton import column_walk
    except ImportError:
        return None
    return column_walk if column_walk.available(device) is None else None
