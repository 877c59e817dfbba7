"""Grids of 16 levels for groups of weights: where they lie, and rounding onto them.

A weight in group g of row n becomes scale[n, g] · q + offset[n, g] with q in 0…15. Scales and offsets are rounded to
float16 before any weight is rounded onto them, so that storing them costs nothing. A symmetric grid is the same with
offset = −8 · scale. Groups run along K; the last one of a row may be shorter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LEVELS = 16
_WHOLE = 1.5 * 2**23  # floats of this size have no fraction
ZERO = 8  # the code of 0 on a symmetric grid
Search = tuple[tuple[float, ...], int]
# Shares of a group's range that are tried, largest first, and how often scale and offset are fitted to each.
THOROUGH = (tuple(1.0 - 0.05 * i for i in range(8)), 2)
QUICK = ((1.0, 0.85, 0.7), 1)
EXACT: Search = ((), 0)
_CHUNK = {"cpu": 1 << 17, "cuda": 1 << 24}  # weights whose candidates are tried at a time: they stay in the cache


@dataclass(frozen=True)
class Grid:
    """scale, offset: [N, G] float32 holding float16 values; group: columns of a group."""

    scale: torch.Tensor
    offset: torch.Tensor
    group: int

    def spread(self, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and offset of every weight, [N, K] each."""
        return tuple(t.repeat_interleave(self.group, 1)[:, :columns] for t in (self.scale, self.offset))  # type: ignore[return-value]

    def codes(self, weight: torch.Tensor) -> torch.Tensor:
        """Nearest codes of a weight [N, K], float32."""
        scale, offset = self.spread(weight.shape[1])
        return to_codes(weight, scale, offset)

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        """The weights [N, K] that codes stand for."""
        scale, offset = self.spread(codes.shape[1])
        return codes * scale + offset


def to_codes(weight: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, levels: int = LEVELS) -> torch.Tensor:
    """The nearest of 16 levels (or of ``levels``); halves go to the even code."""
    # torch.round calls its threads even for a few numbers, which costs twenty times the rounding where cores are busy
    return ((weight - offset) / scale).clamp_(0, levels - 1).add_(_WHOLE).sub_(_WHOLE)


def find_grid(
    weight: torch.Tensor,
    group: int,
    *,
    symmetric: bool = False,
    importance: torch.Tensor | None = None,
    search: Search = THOROUGH,
) -> Grid:
    """The grid of every group of a weight [N, K] float32.

    importance: [K], the weight of each column's squared error; None: all alike. search: the ranges tried and the fits
    of each; kept is what errs least. EXACT: the grid spans the group's range.
    """
    rows, columns = weight.shape
    count = -(-columns // group)
    each = _grouped(weight, group, count)
    mass = torch.ones(columns, device=weight.device) if importance is None else importance.float()
    mass = _grouped(mass.clamp(min=0)[None], group, count)
    mass = torch.where(mass.sum(-1, keepdim=True) > 0, mass, _grouped(torch.ones_like(weight[:1]), group, count))
    step = max(1, _CHUNK[weight.device.type] // max(columns, 1))
    parts = [_best(part, mass, symmetric, search) for part in each.split(step)]
    scale, offset = (torch.cat([p[i] for p in parts]) for i in range(2))
    return Grid(scale.view(rows, count), offset.view(rows, count), group)


def _grouped(weight: torch.Tensor, group: int, count: int) -> torch.Tensor:
    """[N, K] → [N, G, group]; a short last group is filled up with its first column, or mass with nothing."""
    missing = count * group - weight.shape[1]
    if missing:
        fill = weight[:, (count - 1) * group, None].expand(-1, missing)
        weight = torch.cat([weight, fill], 1)
    return weight.reshape(weight.shape[0], count, group)


def _best(each: torch.Tensor, mass: torch.Tensor, symmetric: bool, search: Search) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, G, group] → scale, offset [n, G]."""
    low, high = each.amin(-1), each.amax(-1)
    scale, offset = _snap(low, high, 1.0, symmetric)
    shrinks, fits = search
    if not shrinks:
        return scale, offset
    error = _error(each, mass, scale, offset)
    for shrink in shrinks:
        tried = _snap(low, high, shrink, symmetric)
        for fit in range(fits + 1):
            if fit:
                tried = _fit(each, mass, *tried, symmetric)
            found = _error(each, mass, *tried)
            better = found < error
            error = torch.where(better, found, error)
            scale, offset = torch.where(better, tried[0], scale), torch.where(better, tried[1], offset)
    return scale, offset


def _snap(low: torch.Tensor, high: torch.Tensor, shrink: float, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if symmetric:
        top = torch.maximum(high.abs(), low.abs()) * shrink
        # 8 levels below zero and 7 above: the longer side gets the eighth
        scale = torch.where(-low > high, -top / ZERO, top / ZERO).neg()
        return settle(scale, None)
    return settle((high - low) * shrink / (LEVELS - 1), low + (high - low) * (1 - shrink) / 2)


def settle(scale: torch.Tensor, offset: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounded to float16, held as float32; a scale of 0 becomes 1. offset None: the symmetric one."""
    scale = scale.half().float()
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return scale, -ZERO * scale if offset is None else offset.half().float()


def _error(each: torch.Tensor, mass: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    s, o = scale[..., None], offset[..., None]
    off = to_codes(each, s, o).mul_(s).add_(o).sub_(each)
    return off.square_().mul_(mass).sum(-1)


def _fit(
    each: torch.Tensor, mass: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and offset that err least for the codes which a grid gives."""
    q = to_codes(each, scale[..., None], offset[..., None])
    if symmetric:
        q = q - ZERO
        return settle((mass * q * each).sum(-1) / (mass * q * q).sum(-1).clamp(min=1e-30), None)
    total = mass.sum(-1)
    mean_q, mean_w = (mass * q).sum(-1) / total, (mass * each).sum(-1) / total
    spread = (mass * (q - mean_q[..., None]).square()).sum(-1)
    slope = (mass * (q - mean_q[..., None]) * each).sum(-1) / spread.clamp(min=1e-30)
    slope = torch.where(spread > 0, slope, scale)
    return settle(slope, mean_w - slope * mean_q)
