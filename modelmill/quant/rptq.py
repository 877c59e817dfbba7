"""RPTQ: inputs in integers, their channels reordered into clusters.

Yuan et al. 2023, arXiv:2304.01089. At each site the channels' ranges (min, max) are clustered, a
cluster has one static scale and zero-point, and weights are rounded by GPTQ in clustered order. The
product is an integer GEMM (ops/rptq_linear.py). A token that leaves a cluster's range at 8 bits is
rounded there with a step of its own (ops/rptq_quant.py): ranges found on one kind of text clip
another, and a token that has one clipped value loses most of its output.

The sites are R1 (norm → q, k, v), R3 (attention output → o), R4 (norm → gate, up) and R5 (SwiGLU
output, or GPT-2's GELU → down). Not R2: q and k are multiplied with each other inside attention,
after RoPE, which combines pairs of channels, and are not quantized; nor are the attention
probabilities and the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from modelmill.core.config import BuildConfig
from modelmill.core.errors import UsageError
from modelmill.core.recipe_declaration import (
    ActQuantTolerances,
    FormatTolerances,
    RecipeDeclaration,
    RecipeOption,
)
from modelmill.nn.layer_spec import QuantSiteSpec
from modelmill.quant.channel_clustering import cluster_channels
from modelmill.quant.gptq import damp_hessian, gptq_codes, refine_codes_and_grid
from modelmill.quant.group_grid import GroupGrid, find_group_grid
from modelmill.quant.recipe import InputStatistics, Recipe
from modelmill.weights._rptq_columns import (
    gather_clustered_columns,
    round_scale_to_fp16,
    rptq_group_width_and_count,
)
from modelmill.weights.base import WeightFormat
from modelmill.weights.rptq import RptqWeight

# Read from the source, without importing this file: literals only (core/recipe_declaration.py).
DECLARATION = RecipeDeclaration(
    position=5,
    weight_format="rptq",
    docs=(
        "8/8, 4/8, 4/4 bits, clusters of channels",
        "research: reordered clusters with static steps in true integers; `--copies` for "
        "heavy-tailed inputs",
    ),
    tolerances=FormatTolerances(
        weight=(0.6, 1.0, 3e-2),
        block=(0.8, 0.65, 0.5),
        act_quant=ActQuantTolerances(
            product={"float32": (1e-5, 3e-5), "float16": (2e-2, 5e-2), "bfloat16": (6e-2, 2e-1)},
            layer=(0.2, 0.5, 3e-2),
            logits=0.05,
        ),
    ),
    options={
        "bits": RecipeOption(
            "w8a8", "bits of weights and activations (rptq)", choices=("w8a8", "w4a8", "w4a4")
        ),
        "mode": RecipeOption(
            "exact",
            "where the scales of activations are applied (rptq)",
            choices=("exact", "folded", "dynamic"),
        ),
        "splits_per_channel": RecipeOption(
            None,
            "columns per channel of SwiGLU's output, each for a part of its range, 1 to 4 (rptq): "
            "fewer values are clipped, but down_proj is that many times wider; default: 1 for "
            "w8a8, 2 for w4a8, 3 for w4a4",
            type="int | None",
            flags=("--splits-per-channel", "--copies"),
            between=(1, 4),
        ),
    },
)

BIT_WIDTHS_BY_SCHEME = {"w8a8": (8, 8), "w4a8": (4, 8), "w4a4": (4, 4)}
REFINE_SWEEPS = 3
INT8_LEVELS = 255
# Factors for a calibrated range; the one with the smallest error is used.
RANGE_FACTORS_BY_BITS = {8: (1.3,), 4: tuple(1.0 - 0.04 * i for i in range(22))}
RANGE_FACTOR_WITH_TOKEN_FALLBACK = (
    1.0  # nothing is clipped with the fallback, so that steps need no margin
)
MIN_RANGE_SIDE_SHARE = 0.25  # smallest fraction of the range on its smaller side
# By weight bits: how many times smaller a channel's scale may be than its cluster's; the weight
# shrinks by it.
MAX_CLUSTER_TO_CHANNEL_SCALE_RATIO = {8: 16.0, 4: 2.0}
# Splits that keep SmolLM2's perplexity as documented: W8A8 within 2 %, W4A8 within 2 points of the
# same weights with float inputs, W4A4 within twice (docs/quantization.md).
DEFAULT_SPLITS_BY_SCHEME = {"w8a8": 1, "w4a8": 2, "w4a4": 3}
_MAX_ZERO_POINT = 10_000.0
_MIN_STEP = 1e-8


@dataclass(frozen=True)
class ClusteredColumnQuantParams:
    """Scales and zero-points of a site's columns in clustered order.

    Attributes:
        inverse_step: [P], of the channels.
        zero_point: [P].
        cluster_step: [G].
        rounding_noise: [P], mean square of the rounding error of each column.
    """

    inverse_step: torch.Tensor
    zero_point: torch.Tensor
    cluster_step: torch.Tensor
    rounding_noise: torch.Tensor


class RptqRecipe(Recipe):
    """Options of BuildConfig: bits, mode, splits_per_channel."""

    weight_format = "rptq"
    needs_calibration = True

    def __init__(self, config: BuildConfig, splits_per_channel: int = 1) -> None:
        """Check the options.

        splits_per_channel: for every channel; those of the options apply to R5 alone
        (``module_recipe``).
        """
        self.weight_bits, self.input_bits = BIT_WIDTHS_BY_SCHEME[config.bits]
        self.mode, self.splits_per_channel = config.mode, splits_per_channel
        # the columns of a split channel are to clip, and 4-bit ranges are chosen to
        self.fallback = self.input_bits == 8 and splits_per_channel == 1
        self.pack_options = {
            "mode": self.mode,
            "weight_bits": self.weight_bits,
            "bits": self.input_bits,
        }
        self._heavy_tailed_recipe = self
        splits = resolve_splits_per_channel(config)
        if splits_per_channel > 1:
            self.pack_options = {**self.pack_options, "splits_per_channel": splits_per_channel}
        elif splits > 1:
            if self.mode != "exact":
                raise UsageError(
                    f"--splits-per-channel (--copies) {splits}: is for --mode exact, not "
                    f"{self.mode}; leave it out"
                )
            self._heavy_tailed_recipe = RptqRecipe(config, splits)
        # the head's inputs are not calibrated: dynamic scales
        self._head_recipe = (
            self
            if self.mode == "dynamic"
            else RptqRecipe(replace(config, mode="dynamic", splits_per_channel=None))
        )

    def resolve_options(self, config: BuildConfig) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the splits per channel, and why they are as they are unless the option is set."""
        splits, reasons = resolve_splits_per_channel(config), {}
        if config.splits_per_channel is None:
            why = (
                f"what keeps {config.bits}'s accuracy"
                if config.mode == "exact"
                else f"{config.mode} knows no more"
            )
            reasons["splits_per_channel"] = f"{splits}: {why}"
        return {"splits_per_channel": splits}, reasons

    def module_recipe(self, module_path: str, site: QuantSiteSpec | None = None) -> RptqRecipe:
        """Return the recipe of a linear module by the site that it reads: R5 has heavy tails."""
        if module_path == "head":
            return self._head_recipe
        return self._heavy_tailed_recipe if site is not None and site.heavy_tailed else self

    def quantize(self, weight: torch.Tensor, statistics: InputStatistics | None) -> WeightFormat:
        """Quantize [N, K] float32 to integers.

        Without statistics (the head): nearest, with dynamic input scales.
        """
        if statistics is None:
            return RptqWeight.pack(
                weight, torch.float32, weight_bits=self.weight_bits, bits=self.input_bits
            )
        columns = weight.shape[1]
        group, groups = rptq_group_width_and_count(columns, self.mode, self.splits_per_channel)
        unit, many = (
            (group // self.splits_per_channel, groups)
            if self.mode != "folded"
            else rptq_group_width_and_count(columns, "exact")
        )
        mass = weight.square().sum(0)
        order = cluster_channels(statistics.min_values, statistics.max_values, mass, unit, many).to(
            weight.device
        )
        ranges = None
        if self.mode != "dynamic":
            ranges = find_quant_params(
                statistics,
                order,
                mass,
                unit,
                self.input_bits,
                MAX_CLUSTER_TO_CHANNEL_SCALE_RATIO[self.weight_bits],
                self.splits_per_channel,
                fallback=self.fallback,
            )
        if self.mode == "folded":
            assert ranges is not None, "a static mode"
            order, ranges = move_padding_to_end(order, ranges, group)
        wide, hessian = self._clustered_weight_and_hessian(
            weight, statistics.hessian, order, ranges
        )
        codes, scale, offset = self._round_clustered_weight(
            wide, hessian, unit if self.mode != "folded" else group
        )
        if self.splits_per_channel > 1:
            assert ranges is not None, "a static mode"
            codes, order, ranges = split_each_channel(
                codes, order, ranges, group, self.splits_per_channel, self.input_bits
            )
        quantized = RptqWeight.from_codes(
            codes, scale, offset, order, columns, group, self.input_bits
        )
        return (
            quantized
            if ranges is None
            else quantized.with_static_input_scales(
                ranges.inverse_step,
                ranges.zero_point,
                ranges.cluster_step,
                fallback=self.fallback,
            )
        )

    def _clustered_weight_and_hessian(
        self,
        weight: torch.Tensor,
        hessian: torch.Tensor,
        perm: torch.Tensor,
        ranges: ClusteredColumnQuantParams | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weight to round [N, P] and H of its inputs [P, P], both in clustered order.

        Rounding the inputs adds noise of a known size, by which H grows.
        """
        wide = gather_clustered_columns(weight, perm)
        turned = gather_clustered_columns(
            gather_clustered_columns(hessian, perm).T.contiguous(), perm
        )
        regular = damp_hessian(turned)
        if ranges is None:
            return wide, regular
        noisy = regular + ranges.rounding_noise.diag()
        share = 1.0 / (
            ranges.inverse_step
            * ranges.cluster_step.repeat_interleave(len(perm) // len(ranges.cluster_step))
        )
        return wide * share, noisy / share[:, None] / share

    def _round_clustered_weight(
        self, weight: torch.Tensor, hessian: torch.Tensor, group_size: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return codes [N, P], scale [N, G], offset [N, G] or None."""
        if self.weight_bits == 4:
            grid = find_group_grid(weight, group_size, importance=hessian.diagonal())
            codes = gptq_codes(weight, hessian, grid)
            codes, grid = refine_codes_and_grid(
                weight, hessian, codes, grid, symmetric=False, num_sweeps=REFINE_SWEEPS
            )
            return codes, grid.scale, grid.offset
        top = weight.view(len(weight), -1, group_size).abs().amax(-1) / (INT8_LEVELS // 2)
        scale = (
            round_scale_to_fp16(top)
            if weight.shape[1] > group_size
            else torch.where(top > 0, top, 1.0)
        )
        grid = GroupGrid(scale, -(INT8_LEVELS // 2) * scale, group_size)
        return (
            gptq_codes(weight, hessian, grid, num_levels=INT8_LEVELS) - INT8_LEVELS // 2,
            scale,
            None,
        )


def resolve_splits_per_channel(config: BuildConfig) -> int:
    """Return the columns per channel at R5: the option, or the default of the mode."""
    if config.splits_per_channel is not None:
        return config.splits_per_channel
    return DEFAULT_SPLITS_BY_SCHEME[config.bits] if config.mode == "exact" else 1


def find_quant_params(
    statistics: InputStatistics,
    perm: torch.Tensor,
    importance: torch.Tensor,
    group_width: int,
    bits: int,
    max_step_ratio: float,
    splits_per_channel: int = 1,
    *,
    fallback: bool = False,
) -> ClusteredColumnQuantParams:
    """Choose a scale per cluster, and of each channel a fraction of it, and the zero-points.

    A channel's range is its calibrated range times one factor per cluster: at 8 bits a margin for
    unseen values (none with ``fallback``, which clips nothing), at 4 bits the factor with the
    smallest error on the sampled inputs, weighted by ``importance`` [K].

    max_step_ratio is the largest ratio of a cluster's largest scale to a channel's.
    splits_per_channel columns share a channel's range; at 8 bits the margin grows with them.
    """
    s = statistics
    least, levels = -(2.0 ** (bits - 1)), (2.0**bits - 1) * splits_per_channel
    low, high, rows, cost = (
        gather_clustered_columns(t, perm).view(-1, len(perm) // group_width, group_width)
        for t in (s.min_values[None], s.max_values[None], s.input_samples, importance[None])
    )
    low, high, cost = low[0], high[0], cost[0]
    if bits == 8:  # a side that calibration hardly reached may still occur
        low, high = (
            torch.minimum(low, -MIN_RANGE_SIDE_SHARE * high),
            torch.maximum(high, -MIN_RANGE_SIDE_SHARE * low),
        )
    widest = (high - low).amax(1, keepdim=True)
    best = torch.full_like(widest, torch.inf)
    step, zero = torch.ones_like(low), torch.zeros_like(low)
    if fallback:
        sizes: tuple[float, ...] = (RANGE_FACTOR_WITH_TOKEN_FALLBACK,)
    elif bits == 4:
        sizes = RANGE_FACTORS_BY_BITS[4]
    else:
        sizes = tuple(size * splits_per_channel for size in RANGE_FACTORS_BY_BITS[bits])
    for size in sizes:
        tried = (torch.maximum(high - low, widest / max_step_ratio) * (size / levels)).clamp(
            min=_MIN_STEP
        )
        shift = (
            (least + levels / 2 - (low + high) / 2 / tried)
            .round()
            .clamp(-_MAX_ZERO_POINT, _MAX_ZERO_POINT)
        )
        q = ((rows / tried).round() + shift).clamp(least, least + levels)
        error = (((q - shift) * tried - rows).square() * cost).sum((0, 2))[:, None]
        better = error < best
        best = torch.where(better, error, best)
        step, zero = torch.where(better, tried, step), torch.where(better, shift, zero)
    factor = 1.0 / step
    noise = torch.where(perm >= 0, factor.reciprocal().flatten().square() / 12, 0.0)
    return ClusteredColumnQuantParams(
        factor.flatten(), zero.flatten(), factor.reciprocal().amax(1), noise
    )


def split_each_channel(
    codes: torch.Tensor,
    perm: torch.Tensor,
    ranges: ClusteredColumnQuantParams,
    group_size: int,
    splits_per_channel: int,
    bits: int,
) -> tuple[torch.Tensor, torch.Tensor, ClusteredColumnQuantParams]:
    """Split every channel into ``splits_per_channel`` columns and fill groups up to ``group_size``.

    codes: [N, P]; perm and ranges: [P]. The first column of a channel covers the lowest part of its
    integers, the next one the following part.
    """
    groups = len(ranges.cluster_step)
    missing = group_size - len(perm) // groups * splits_per_channel

    def wide(t: torch.Tensor, fill: float) -> torch.Tensor:
        each = t.repeat_interleave(splits_per_channel, -1).unflatten(-1, (groups, -1))
        return F.pad(each, (0, missing), value=fill).flatten(-2)

    stretch = 2.0**bits - 1
    number = (
        torch.arange(splits_per_channel, device=perm.device)
        .repeat(len(perm))
        .unflatten(-1, (groups, -1))
    )
    shift = F.pad(number, (0, missing)).flatten() * stretch
    kept = ClusteredColumnQuantParams(
        wide(ranges.inverse_step, 1),
        wide(ranges.zero_point, 0) - shift,
        ranges.cluster_step,
        wide(ranges.rounding_noise, 0),
    )
    return wide(codes, 0), wide(perm, -1), kept


def move_padding_to_end(
    perm: torch.Tensor, ranges: ClusteredColumnQuantParams, width: int
) -> tuple[torch.Tensor, ClusteredColumnQuantParams]:
    """Move the clusters together and the empty columns to the end; scales go into the weight."""
    real = perm >= 0
    missing = width - int(real.sum())

    def closed(t: torch.Tensor, fill: float) -> torch.Tensor:
        return torch.cat([t[real], t.new_full((missing,), fill)])

    kept = ClusteredColumnQuantParams(
        closed(ranges.inverse_step, 1),
        closed(ranges.zero_point, 0),
        ranges.cluster_step.new_ones(1),
        closed(ranges.rounding_noise, 0),
    )
    return closed(perm, -1), kept


RECIPE = RptqRecipe
