"""Grids of 16 levels for groups of weights: their scales and offsets, and rounding to them.

A weight in group g of row n becomes scale[n, g] · q + offset[n, g] with q in 0…15. Scales and
offsets are rounded to float16 before any weight is rounded, so that storing them causes no further
error. A symmetric grid is the same with offset = −8 · scale. Groups run along K; the last one of a
row may be shorter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

INT4_LEVELS = 16
_ROUND_MAGIC = 1.5 * 2**23  # from this size on, floats have no fraction
SYMMETRIC_ZERO_POINT = 8  # the code of 0 on a symmetric grid
RangeSearch = tuple[tuple[float, ...], int]
# Fractions of a group's range to try, largest first, and how often scale and offset are fitted to
# each.
THOROUGH_RANGE_SEARCH = (tuple(1.0 - 0.05 * i for i in range(8)), 2)
QUICK_RANGE_SEARCH = ((1.0, 0.85, 0.7), 1)
MIN_MAX_RANGE: RangeSearch = ((), 0)
_CHUNK_WEIGHTS_BY_DEVICE = {
    "cpu": 1 << 17,
    "cuda": 1 << 24,
}  # weights processed at a time, so that their candidates stay in the CPU cache


@dataclass(frozen=True)
class GroupGrid:
    """Scale and offset of each group.

    Attributes:
        scale: [N, G] float32 with float16 values.
        offset: shaped as scale.
        group_size: columns of a group.
    """

    scale: torch.Tensor
    offset: torch.Tensor
    group_size: int

    def expand_to_columns(self, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scale and offset of every weight, [N, K] each."""
        return tuple(
            t.repeat_interleave(self.group_size, 1)[:, :num_columns]
            for t in (self.scale, self.offset)
        )  # type: ignore[return-value]

    def quantize(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the nearest codes of a weight [N, K], float32."""
        scale, offset = self.expand_to_columns(weight.shape[1])
        return round_to_codes(weight, scale, offset)

    def dequantize(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the weights [N, K] of the codes."""
        scale, offset = self.expand_to_columns(codes.shape[1])
        return codes * scale + offset


def round_to_codes(
    weight: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, num_levels: int = INT4_LEVELS
) -> torch.Tensor:
    """Return the nearest of 16 levels (or of ``num_levels``), rounding half to even."""
    # torch.round uses its thread pool even for a few numbers, which takes twenty times as long as
    # the rounding on busy cores
    return (
        ((weight - offset) / scale).clamp_(0, num_levels - 1).add_(_ROUND_MAGIC).sub_(_ROUND_MAGIC)
    )


def find_group_grid(
    weight: torch.Tensor,
    group_size: int,
    *,
    symmetric: bool = False,
    importance: torch.Tensor | None = None,
    search: RangeSearch = THOROUGH_RANGE_SEARCH,
) -> GroupGrid:
    """Return the grid of every group of a weight [N, K] float32.

    Args:
        weight: [N, K] float32.
        group_size: columns of a group.
        symmetric: whether offsets are −8 · scale.
        importance: [K], weight of each column's squared error; None: all equal.
        search: the ranges to try and the number of fits of each; the smallest error wins.
            MIN_MAX_RANGE: the grid spans the group's range.
    """
    rows, columns = weight.shape
    count = -(-columns // group_size)
    each = _reshape_to_groups(weight, group_size, count)
    mass = torch.ones(columns, device=weight.device) if importance is None else importance.float()
    mass = _reshape_to_groups(mass.clamp(min=0)[None], group_size, count)
    mass = torch.where(
        mass.sum(-1, keepdim=True) > 0,
        mass,
        _reshape_to_groups(torch.ones_like(weight[:1]), group_size, count),
    )
    step = max(1, _CHUNK_WEIGHTS_BY_DEVICE[weight.device.type] // max(columns, 1))
    parts = [_search_scale_and_offset(part, mass, symmetric, search) for part in each.split(step)]
    scale, offset = (torch.cat([p[i] for p in parts]) for i in range(2))
    return GroupGrid(scale.view(rows, count), offset.view(rows, count), group_size)


def _reshape_to_groups(weight: torch.Tensor, group_size: int, num_groups: int) -> torch.Tensor:
    """Reshape [N, K] to [N, G, group].

    A short last group is padded with its first column, an importance with 0.
    """
    missing = num_groups * group_size - weight.shape[1]
    if missing:
        fill = weight[:, (num_groups - 1) * group_size, None].expand(-1, missing)
        weight = torch.cat([weight, fill], 1)
    return weight.reshape(weight.shape[0], num_groups, group_size)


def _search_scale_and_offset(
    groups: torch.Tensor, importance: torch.Tensor, symmetric: bool, search: RangeSearch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Search scale and offset [n, G] of groups [n, G, group]."""
    low, high = groups.amin(-1), groups.amax(-1)
    scale, offset = _grid_spanning_range(low, high, 1.0, symmetric)
    shrinks, fits = search
    if not shrinks:
        return scale, offset
    error = _weighted_error(groups, importance, scale, offset)
    for shrink in shrinks:
        tried = _grid_spanning_range(low, high, shrink, symmetric)
        for fit in range(fits + 1):
            if fit:
                tried = _least_squares_fit(groups, importance, *tried, symmetric)
            candidate_error = _weighted_error(groups, importance, *tried)
            better = candidate_error < error
            error = torch.where(better, candidate_error, error)
            scale, offset = (
                torch.where(better, tried[0], scale),
                torch.where(better, tried[1], offset),
            )
    return scale, offset


def _grid_spanning_range(
    low: torch.Tensor, high: torch.Tensor, range_factor: float, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if symmetric:
        top = torch.maximum(high.abs(), low.abs()) * range_factor
        # 8 levels below zero and 7 above: the side with the larger range gets the eighth
        scale = torch.where(
            -low > high, -top / SYMMETRIC_ZERO_POINT, top / SYMMETRIC_ZERO_POINT
        ).neg()
        return round_grid_to_fp16(scale, None)
    return round_grid_to_fp16(
        (high - low) * range_factor / (INT4_LEVELS - 1), low + (high - low) * (1 - range_factor) / 2
    )


def round_grid_to_fp16(
    scale: torch.Tensor, offset: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to float16 values in float32; a scale of 0 becomes 1.

    offset None: symmetric.
    """
    scale = scale.half().float()
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return scale, -SYMMETRIC_ZERO_POINT * scale if offset is None else offset.half().float()


def _weighted_error(
    groups: torch.Tensor, importance: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor
) -> torch.Tensor:
    s, o = scale[..., None], offset[..., None]
    off = round_to_codes(groups, s, o).mul_(s).add_(o).sub_(groups)
    return off.square_().mul_(importance).sum(-1)


def _least_squares_fit(
    groups: torch.Tensor,
    importance: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor,
    symmetric: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least-squares scale and offset for the codes that a grid gives."""
    q = round_to_codes(groups, scale[..., None], offset[..., None])
    if symmetric:
        q = q - SYMMETRIC_ZERO_POINT
        return round_grid_to_fp16(
            (importance * q * groups).sum(-1) / (importance * q * q).sum(-1).clamp(min=1e-30), None
        )
    total = importance.sum(-1)
    mean_q, mean_w = (importance * q).sum(-1) / total, (importance * groups).sum(-1) / total
    spread = (importance * (q - mean_q[..., None]).square()).sum(-1)
    slope = (importance * (q - mean_q[..., None]) * groups).sum(-1) / spread.clamp(min=1e-30)
    slope = torch.where(spread > 0, slope, scale)
    return round_grid_to_fp16(slope, mean_w - slope * mean_q)
