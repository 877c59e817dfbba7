"""RPTQ (Yuan et al. 2023, arXiv:2304.01089): inputs in integers, their channels reordered into clusters.

Of each site's channels the ends (min, max) are clustered, a cluster has one static step and zero-point, and weights
are rounded by GPTQ in clustered order. What is multiplied is integers (ops/clustered_linear.py). The sites are R1 (norm
→ q, k, v), R3 (attention output → o), R4 (norm → gate, up) and R5 (SwiGLU output, or GPT-2's GELU → down). Not R2: q
and k are multiplied with each other inside attention, after a rotation that ties channels in pairs, and stay as they
are; so do the attention probabilities and the KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from modelmill.core.config import BuildConfig
from modelmill.core.errors import UsageError
from modelmill.quant.block import Block
from modelmill.quant.cluster import order_of
from modelmill.quant.gptq import damped, gptq, refine
from modelmill.quant.grid import Grid, find_grid
from modelmill.quant.recipe import Prepared, Statistics
from modelmill.weights._clusters import groups_of, settled, spread
from modelmill.weights.clustered import Held
from modelmill.weights.held import HeldWeight

BITS = {"w8a8": (8, 8), "w4a8": (4, 8), "w4a4": (4, 4)}
SWEEPS = 3
LEVELS = 255
# What a range of calibration is multiplied with: one of these, by what errs least.
SIZES = {8: (1.3,), 4: tuple(1.0 - 0.04 * i for i in range(22))}
SIDE = 0.25  # of a range, that the side which was seen less has at least
# By weight bits, how much smaller a channel's step may be than its cluster's: the weight shrinks with it.
FLATTEST = {8: 16.0, 4: 2.0}
# What keeps SmolLM2's perplexity where it was promised: W8A8 within 2 %, W4A8 within 2 points of its own weights with
# inputs as they are, W4A4 within twice (docs/quantization.md).
COPIES = {"w8a8": 1, "w4a8": 2, "w4a4": 3}
_MOST_ZERO = 10_000.0
_LEAST_STEP = 1e-8


@dataclass(frozen=True)
class Ranges:
    """Of a site's columns in clustered order: factor [P] = 1 / the channel's step, zero [P], step [G], its cluster's.

    noise: [P], the mean square that rounding adds to each column.
    """

    factor: torch.Tensor
    zero: torch.Tensor
    step: torch.Tensor
    noise: torch.Tensor


class Recipe:
    """Options of BuildConfig: bits, mode, copies."""

    kind = "clustered"
    calibrated = True
    prepares = False

    def __init__(self, config: BuildConfig, copies: int = 1) -> None:
        """copies: of every channel; those that the options ask for are at R5 alone (``of``)."""
        self.weight_bits, self.bits = BITS[config.bits]
        self.mode, self.copies = config.mode, copies
        self.layout: Mapping[str, Any] = {"mode": self.mode, "weight_bits": self.weight_bits, "bits": self.bits}
        self._heavy = self
        asked = copies_of(config)
        if copies > 1:
            self.layout = {**self.layout, "copies": copies}
        elif asked > 1:
            if self.mode != "exact":
                raise UsageError(f"--copies {asked}: is for --mode exact, not {self.mode}; leave it out")
            self._heavy = Recipe(config, asked)
        # nothing is known of what the head will read: its inputs are scaled as they come
        self._head = self if self.mode == "dynamic" else Recipe(replace(config, mode="dynamic", copies=None))

    def of(self, module: str) -> Recipe:
        """The recipe of a linear module by its name: R5's inputs have heavy tails."""
        if module == "head":
            return self._head
        return self._heavy if module.endswith("mlp.down_proj") else self

    def prepare(self, block: Block, statistics: Mapping[str, Statistics], dtype: torch.dtype) -> Prepared:  # noqa: ARG002
        """Nothing."""
        return Prepared()

    def hold(self, weight: torch.Tensor, statistics: Statistics | None) -> HeldWeight:
        """[N, K] float32 → integers. Without statistics (the head): nearest, inputs scaled as they come."""
        if statistics is None:
            return Held.pack(weight, torch.float32, weight_bits=self.weight_bits, bits=self.bits)
        columns = weight.shape[1]
        group, groups = groups_of(columns, self.mode, self.copies)
        unit, many = (group // self.copies, groups) if self.mode != "folded" else groups_of(columns, "exact")
        mass = weight.square().sum(0)
        order = order_of(statistics.low, statistics.high, mass, unit, many).to(weight.device)
        ranges = None
        if self.mode != "dynamic":
            ranges = find_ranges(statistics, order, mass, unit, self.bits, FLATTEST[self.weight_bits], self.copies)
        if self.mode == "folded":
            assert ranges is not None, "a static mode"
            order, ranges = without_gaps(order, ranges, group)
        wide, hessian = self._target(weight, statistics.hessian, order, ranges)
        codes, scale, offset = self._round(wide, hessian, unit if self.mode != "folded" else group)
        if self.copies > 1:
            assert ranges is not None, "a static mode"
            codes, order, ranges = copied(codes, order, ranges, group, self.copies, self.bits)
        held = Held.from_codes(codes, scale, offset, order, columns, group, self.bits)
        return held if ranges is None else held.static(ranges.factor, ranges.zero, ranges.step)

    def _target(
        self, weight: torch.Tensor, hessian: torch.Tensor, order: torch.Tensor, ranges: Ranges | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the weight to round [N, P], H of what it will be multiplied with [P, P]), both in clustered order.

        What rounding the inputs adds to them is noise of a known size, by which H grows.
        """
        wide = spread(weight, order)
        turned = spread(spread(hessian, order).T.contiguous(), order)
        regular = damped(turned)
        if ranges is None:
            return wide, regular
        noisy = regular + ranges.noise.diag()
        share = 1.0 / (ranges.factor * ranges.step.repeat_interleave(len(order) // len(ranges.step)))
        return wide * share, noisy / share[:, None] / share

    def _round(
        self, wide: torch.Tensor, hessian: torch.Tensor, group: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(codes [N, P], scale [N, G], offset [N, G] or None)."""
        if self.weight_bits == 4:
            grid = find_grid(wide, group, importance=hessian.diagonal())
            codes = gptq(wide, hessian, grid)
            codes, grid = refine(wide, hessian, codes, grid, symmetric=False, sweeps=SWEEPS)
            return codes, grid.scale, grid.offset
        top = wide.view(len(wide), -1, group).abs().amax(-1) / (LEVELS // 2)
        scale = settled(top) if wide.shape[1] > group else torch.where(top > 0, top, 1.0)
        grid = Grid(scale, -(LEVELS // 2) * scale, group)
        return gptq(wide, hessian, grid, levels=LEVELS) - LEVELS // 2, scale, None


def copies_of(config: BuildConfig) -> int:
    """Columns of each channel at R5: as asked, or what keeps the promised accuracy in the mode that knows copies."""
    if config.copies is not None:
        return config.copies
    return COPIES[config.bits] if config.mode == "exact" else 1


def find_ranges(
    statistics: Statistics,
    order: torch.Tensor,
    mass: torch.Tensor,
    unit: int,
    bits: int,
    flattest: float,
    copies: int = 1,
) -> Ranges:
    """Steps and zero-points: of each cluster a step, of each channel in it a share of that step.

    A channel's range is what calibration saw of it, times one number a cluster: at 8 bits a margin for what was not
    seen, at 4 bits what errs least on the inputs that were kept, weighted by ``mass`` [K]. flattest: the most by which
    a channel's step is smaller than the largest of its cluster. copies: columns that share a channel's range; at 8
    bits the margin grows with them.
    """
    s = statistics
    least, levels = -(2.0 ** (bits - 1)), (2.0**bits - 1) * copies
    low, high, rows, cost = (
        spread(t, order).view(-1, len(order) // unit, unit) for t in (s.low[None], s.high[None], s.rows, mass[None])
    )
    low, high, cost = low[0], high[0], cost[0]
    if bits == 8:  # a side that was hardly seen may come yet
        low, high = torch.minimum(low, -SIDE * high), torch.maximum(high, -SIDE * low)
    widest = (high - low).amax(1, keepdim=True)
    best = torch.full_like(widest, torch.inf)
    step, zero = torch.ones_like(low), torch.zeros_like(low)
    for size in SIZES[4] if bits == 4 else [size * copies for size in SIZES[bits]]:
        tried = (torch.maximum(high - low, widest / flattest) * (size / levels)).clamp(min=_LEAST_STEP)
        shift = (least + levels / 2 - (low + high) / 2 / tried).round().clamp(-_MOST_ZERO, _MOST_ZERO)
        q = ((rows / tried).round() + shift).clamp(least, least + levels)
        error = (((q - shift) * tried - rows).square() * cost).sum((0, 2))[:, None]
        better = error < best
        best = torch.where(better, error, best)
        step, zero = torch.where(better, tried, step), torch.where(better, shift, zero)
    factor = 1.0 / step
    noise = torch.where(order >= 0, factor.reciprocal().flatten().square() / 12, 0.0)
    return Ranges(factor.flatten(), zero.flatten(), factor.reciprocal().amax(1), noise)


def copied(
    codes: torch.Tensor, order: torch.Tensor, ranges: Ranges, group: int, copies: int, bits: int
) -> tuple[torch.Tensor, torch.Tensor, Ranges]:
    """Codes [N, P], order and ranges [P] with ``copies`` columns a channel, groups filled up to ``group`` columns.

    The first column of a channel covers the lowest stretch of its integers, the next one what follows.
    """
    groups = len(ranges.step)
    missing = group - len(order) // groups * copies

    def wide(t: torch.Tensor, fill: float) -> torch.Tensor:
        each = t.repeat_interleave(copies, -1).unflatten(-1, (groups, -1))
        return F.pad(each, (0, missing), value=fill).flatten(-2)

    stretch = 2.0**bits - 1
    number = torch.arange(copies, device=order.device).repeat(len(order)).unflatten(-1, (groups, -1))
    shift = F.pad(number, (0, missing)).flatten() * stretch
    kept = Ranges(wide(ranges.factor, 1), wide(ranges.zero, 0) - shift, ranges.step, wide(ranges.noise, 0))
    return wide(codes, 0), wide(order, -1), kept


def without_gaps(order: torch.Tensor, ranges: Ranges, width: int) -> tuple[torch.Tensor, Ranges]:
    """The same clusters side by side, columns that stay empty at the end; their steps go into the weight."""
    real = order >= 0
    missing = width - int(real.sum())

    def closed(t: torch.Tensor, fill: float) -> torch.Tensor:
        return torch.cat([t[real], t.new_full((missing,), fill)])

    kept = Ranges(closed(ranges.factor, 1), closed(ranges.zero, 0), ranges.step.new_ones(1), closed(ranges.noise, 0))
    return closed(order, -1), kept
