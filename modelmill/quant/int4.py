"""Weight-only int4 in groups: nearest, GPTQ, AWQ, or AWQ's scales with GPTQ's rounding.

nearest uses the weights alone. awq scales channels and clips each group's range to minimise the
error on the calibration inputs; gptq rounds column by column with error compensation, and then
refines.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from modelmill.core.config import BuildConfig
from modelmill.core.recipe_declaration import (
    FormatTolerances,
    RecipeDeclaration,
    RecipeOption,
)
from modelmill.quant.awq import search_and_fold_scales
from modelmill.quant.calibrate import weight_output_error
from modelmill.quant.calibration_state import QuantizableLayer
from modelmill.quant.gptq import damp_hessian, gptq_codes, refine_codes_and_grid
from modelmill.quant.group_grid import QUICK_RANGE_SEARCH, find_group_grid
from modelmill.quant.recipe import InputStatistics, PrepareResult, Recipe
from modelmill.weights.base import WeightFormat
from modelmill.weights.int4 import Int4Weight, resolve_group_size

# Read from the source, without importing this file: literals only (core/recipe_declaration.py).
DECLARATION = RecipeDeclaration(
    position=2,
    weight_format="int4",
    docs=(
        "4 / 16 bits, groups of `--group-size` 128, 64, 32",
        "decoding few sequences is all that counts: weights are the traffic; GPTQ by default "
        "(`--method nearest, gptq, awq`)",
    ),
    tolerances=FormatTolerances(weight=(0.6, 1.0, 3e-2), block=(0.8, 0.65, 0.5)),
    options={
        "method": RecipeOption(
            "auto",
            "rounding method of the recipe; auto: the most accurate one measured for it",
            choices=("auto", "nearest", "gptq", "awq", "awq+gptq"),
        ),
        "group_size": RecipeOption(
            128,
            "columns that share a scale (int4); -1: the whole row, for comparison",
            choices=(128, 64, 32, -1),
        ),
        "symmetric": RecipeOption(False, "scales without zero-points (int4)"),
    },
)

DEFAULT_METHOD = "gptq"
REFINE_SWEEPS = 3


class Int4Recipe(Recipe):
    """Options of BuildConfig: method, group_size, symmetric."""

    weight_format = "int4"

    def __init__(self, config: BuildConfig) -> None:
        self.method = DEFAULT_METHOD if config.method == "auto" else config.method
        self.group_size, self.symmetric = config.group_size, config.symmetric
        self.pack_options = {
            "group_size": self.group_size,
            "symmetric": self.symmetric,
        }
        self.needs_calibration = self.method != "nearest"
        self.needs_prepare = self.method.startswith("awq")

    def prepare_layer(
        self, block: QuantizableLayer, statistics: Mapping[str, InputStatistics], dtype: torch.dtype
    ) -> PrepareResult:
        """Apply AWQ's scales.

        The report's "before" error is measured here, without the scales; measured later, it would
        include their gain.
        """
        if not self.needs_prepare:
            return PrepareResult()
        before = {
            site: self._nearest_rounding_error(block.stacked_site_weight(site), statistics[site])
            for site in block.sites
        }
        done = search_and_fold_scales(block, statistics, self._quantize_dequantize_quickly, dtype)
        done.facts = {
            site: {**done.facts.get(site, {}), "before": before[site]} for site in block.sites
        }
        return done

    def quantize(self, weight: torch.Tensor, statistics: InputStatistics | None) -> WeightFormat:
        """Quantize [N, K] float32 to int4."""
        group = resolve_group_size(self.group_size, weight.shape[1])
        if statistics is None or not self.needs_calibration:
            return Int4Weight.pack(
                weight, torch.float32, group_size=group, symmetric=self.symmetric
            )
        hessian = damp_hessian(statistics.hessian)
        grid = find_group_grid(
            weight, group, symmetric=self.symmetric, importance=hessian.diagonal()
        )
        if self.method == "awq":
            codes = grid.quantize(weight)
        else:
            codes = gptq_codes(weight, hessian, grid)
            codes, grid = refine_codes_and_grid(
                weight, hessian, codes, grid, symmetric=self.symmetric, num_sweeps=REFINE_SWEEPS
            )
        return Int4Weight.from_codes(
            codes, grid.scale, None if self.symmetric else grid.offset, group
        )

    def _nearest_rounding_error(self, weight: torch.Tensor, statistics: InputStatistics) -> float:
        return weight_output_error(
            weight, Int4Weight.pack(weight, torch.float32, **self.pack_options), statistics
        )

    def _quantize_dequantize_quickly(
        self, weight: torch.Tensor, statistics: InputStatistics
    ) -> torch.Tensor:
        """Quantize a weight with a coarse search of ranges, for AWQ's search."""
        group = resolve_group_size(self.group_size, weight.shape[1])
        importance = statistics.hessian.diagonal()
        grid = find_group_grid(
            weight,
            group,
            symmetric=self.symmetric,
            importance=importance,
            search=QUICK_RANGE_SEARCH,
        )
        return grid.dequantize(grid.quantize(weight))


RECIPE = Int4Recipe
