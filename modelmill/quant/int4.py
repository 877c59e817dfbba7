"""Weight-only int4 in groups: nearest, GPTQ, AWQ, or AWQ's scales with GPTQ's rounding.

nearest looks at the weights alone. awq scales channels and clips each group's range to what errs least on the
calibration inputs; gptq rounds column by column, each column's error carried on by the others, and then refines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from modelmill.core.config import METHODS, BuildConfig
from modelmill.quant.awq import scale_block
from modelmill.quant.block import SITES, Block
from modelmill.quant.calibrate import output_error
from modelmill.quant.gptq import damped, gptq, refine
from modelmill.quant.grid import QUICK, find_grid
from modelmill.quant.recipe import Prepared, Statistics
from modelmill.weights.held import HeldWeight
from modelmill.weights.int4 import Held, columns_of

BEST = "gptq"
SWEEPS = 3


class Recipe:
    """Options of BuildConfig: method, group_size, symmetric."""

    kind = "int4"

    def __init__(self, config: BuildConfig) -> None:
        self.method = BEST if config.method == "auto" else config.method
        assert self.method in METHODS, "BuildConfig checks it"
        self.group, self.symmetric = config.group_size, config.symmetric
        self.layout: Mapping[str, Any] = {"group": self.group, "symmetric": self.symmetric}
        self.calibrated = self.method != "nearest"
        self.prepares = self.method.startswith("awq")

    def prepare(self, block: Block, statistics: Mapping[str, Statistics], dtype: torch.dtype) -> Prepared:
        """AWQ's scales. What rounding costs without them is told as "before": seen later, it would count their gain."""
        if not self.prepares:
            return Prepared()
        before = {site: self._nearest(block.linear(site).held.dense(), statistics[site]) for site in SITES}
        done = scale_block(block, statistics, self._clipped, dtype)
        done.facts = {site: {**done.facts.get(site, {}), "before": before[site]} for site in SITES}
        return done

    def hold(self, weight: torch.Tensor, statistics: Statistics | None) -> HeldWeight:
        """[N, K] float32 → int4."""
        group = columns_of(self.group, weight.shape[1])
        if statistics is None or not self.calibrated:
            return Held.pack(weight, torch.float32, group=group, symmetric=self.symmetric)
        hessian = damped(statistics.hessian)
        grid = find_grid(weight, group, symmetric=self.symmetric, importance=hessian.diagonal())
        if self.method == "awq":
            codes = grid.codes(weight)
        else:
            codes = gptq(weight, hessian, grid)
            codes, grid = refine(weight, hessian, codes, grid, symmetric=self.symmetric, sweeps=SWEEPS)
        return Held.from_codes(codes, grid.scale, None if self.symmetric else grid.offset, group)

    def _nearest(self, weight: torch.Tensor, statistics: Statistics) -> float:
        return output_error(weight, Held.pack(weight, torch.float32, **self.layout), statistics)

    def _clipped(self, weight: torch.Tensor, statistics: Statistics) -> torch.Tensor:
        """A weight rounded with ranges searched in haste, for AWQ's search."""
        group = columns_of(self.group, weight.shape[1])
        importance = statistics.hessian.diagonal()
        grid = find_grid(weight, group, symmetric=self.symmetric, importance=importance, search=QUICK)
        return grid.values(grid.codes(weight))
