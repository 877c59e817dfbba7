"""SmoothQuant: channels with large activations are scaled down before rounding.

Xiao et al. 2022, arXiv:2211.10438. s_j = max|X_j|^α / max|W_j|^(1−α), max|W_j| over all rows that
read channel j; inputs are divided by s in the op that produces them, the weight's columns
multiplied, so that the layer computes the same. The layer's spec names what produces each site: a
norm, or rows of a linear layer (v for the attention output; up for SwiGLU's output, since out = up
· silu(gate) is linear in up). Under GQA a smoother is one vector for all q heads of a KV head: both
maxima are taken over them. GPT-2's activation is linear in none of its inputs, so the input of its
second matrix is not scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from modelmill.nn.partition import HeadGroups
from modelmill.quant.awq import can_fold_scales, fold_scales
from modelmill.quant.calibration_state import (
    CalibrationBatch,
    CalibrationState,
    QuantizableLayer,
)
from modelmill.quant.recipe import InputStatistics, PrepareResult, Scales

MIN_SCALE = 1e-5
ALPHA_GRID = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
ALPHA_REFINE_STEP = 0.05
SiteAlphas = dict[str, float | None]  # site → α; None: not smoothed


def smoothing_scales(
    block: QuantizableLayer, site: str, max_abs: torch.Tensor, alpha: float
) -> torch.Tensor:
    """Return s [K] ≥ 1e-5 of a site whose inputs reach ``max_abs`` [K], with a geometric mean of 1.

    A channel that is always 0, or that no matrix reads, is not scaled. The mean is free: per-token
    and per-tensor scales absorb a common factor, and a norm's weight keeps its magnitude.
    """
    weight = block.stacked_site_weight(site).abs().amax(0)
    groups = block.producer_head_groups(site)
    if groups is not None:
        max_abs, weight = max_over_kv_group(groups, max_abs), max_over_kv_group(groups, weight)
    scales = max_abs.pow(alpha) / weight.clamp(min=MIN_SCALE).pow(1 - alpha)
    known = (max_abs > 0) & (weight > 0)
    mean = (
        scales[known].log().mean().exp()
        if bool(known.any())
        else torch.ones((), device=scales.device)
    )
    return torch.where(known, scales / mean, torch.ones_like(scales)).clamp(min=MIN_SCALE)


def max_over_kv_group(groups: HeadGroups, vector: torch.Tensor) -> torch.Tensor:
    """Return, for each q head of a KV head, the maximum over these heads."""
    each = groups.reshape_by_group(vector)
    return each.amax(1, keepdim=True).expand_as(each).reshape(-1)


def apply_smoothing(
    block: QuantizableLayer,
    statistics: Mapping[str, InputStatistics],
    alphas: SiteAlphas,
    dtype: torch.dtype,
) -> Scales:
    """Fold the smoothers of all sites into the layer.

    Args:
        block: the layer.
        statistics: input statistics by site.
        alphas: α by site.
        dtype: dtype in which norms and biases are stored.

    Returns:
        What the inputs were divided by, by site.
    """
    folded: Scales = {}
    for site in block.spec.scale_fold_order:
        alpha = alphas.get(site)
        if alpha is not None:
            scales = smoothing_scales(block, site, statistics[site].max_abs, alpha)
            folded[site] = fold_scales(block, site, scales, dtype)
    return folded


class SmoothingTrial:
    """Evaluates smoothers on a layer with quantized matrices, and restores the layer afterwards.

    round_layer: quantizes the dense, folded layer.
    """

    def __init__(
        self,
        block: QuantizableLayer,
        statistics: Mapping[str, InputStatistics],
        calibration: CalibrationState,
        dtype: torch.dtype,
        round_layer: Callable[[QuantizableLayer, CalibrationState], None],
    ) -> None:
        self.block = block
        self.statistics = statistics
        self.calibration = calibration
        self.dtype = dtype
        self.round_layer = round_layer
        exact = calibration.fork()
        exact.forward_layer(block)
        self._expected = [_residual_stream(batch) for batch in exact.batches]

    def measure_output_error(self, alphas: SiteAlphas) -> float:
        """Return the relative root mean squared error of the layer's output."""
        with restore_layer_on_exit(self.block):
            apply_smoothing(self.block, self.statistics, alphas, self.dtype)
            tokens = self.calibration.fork()
            self.round_layer(self.block, tokens)
            total, count = 0.0, 0
            for batch, right in zip(tokens.batches, self._expected, strict=True):
                off = (_residual_stream(batch) - right).square().sum(-1) / right.square().sum(
                    -1
                ).clamp(min=1e-30)
                total, count = total + float(off.sum()), count + len(off)
        error: float = (total / max(count, 1)) ** 0.5
        return error


def search_smoothing_alphas(trial: SmoothingTrial) -> tuple[SiteAlphas, float, float]:
    """Search the α of each site: first one α for the layer, then each site separately.

    A site may also be left unsmoothed. The α with the smallest error is kept; at equal error, the
    simpler choice.

    Returns:
        α by site, the layer's error with them, and the error without smoothing.
    """
    sites = trial.block.sites
    nothing: SiteAlphas = dict.fromkeys(sites)
    plain = trial.measure_output_error(nothing)
    best, least = nothing, plain

    def tried(alphas: SiteAlphas) -> None:
        nonlocal best, least
        error = trial.measure_output_error(alphas)
        if error < least:
            best, least = alphas, error

    for alpha in ALPHA_GRID:
        tried(dict.fromkeys(sites, alpha))
    middle = next(iter(best.values()))
    if middle is not None:
        for alpha in (middle - ALPHA_REFINE_STEP, middle + ALPHA_REFINE_STEP):
            tried(dict.fromkeys(sites, round(alpha, 2)))
    for site in trial.block.spec.scale_fold_order:
        now = best[site]
        others: tuple[float | None, ...] = ALPHA_GRID[::2]
        if now is not None:
            others = (
                None,
                round(now - 2 * ALPHA_REFINE_STEP, 2),
                round(now + 2 * ALPHA_REFINE_STEP, 2),
            )
        for other in others:
            tried({**best, site: other})
    return best, least, plain


@contextmanager
def restore_layer_on_exit(block: QuantizableLayer) -> Iterator[None]:
    """Restore the layer's weights, norms and biases on exit; changes inside replace the tensors."""
    modules = block.all_linears().values()
    saved = [(linear, linear.weight, linear.bias) for linear in modules]
    affine: list[tuple[Any, Any, Any]] = [
        (norm, norm.weight, getattr(norm, "bias", None)) for norm in block.norms_with_weights()
    ]
    try:
        yield
    finally:
        for linear, weight, bias in saved:
            linear.weight, linear.bias = weight, bias
        for norm, weight, bias in affine:
            norm.weight = weight
            if bias is not None:
                norm.bias = bias


def smoothing_result(
    block: QuantizableLayer, folded_scales: Scales, alphas: SiteAlphas
) -> PrepareResult:
    """Return the smoothing of the layer for the report."""
    facts: dict[str, Any] = {}
    for site in block.sites:
        facts[site] = {"alpha": alphas.get(site) if site in folded_scales else None}
        if not can_fold_scales(block, site):
            facts[site]["note"] = "its input is linear in nothing: not smoothed"
    return PrepareResult(folded_scales, facts)


def _residual_stream(batch: CalibrationBatch) -> torch.Tensor:
    return batch.x.float() if batch.residual is None else batch.x.float() + batch.residual.float()
