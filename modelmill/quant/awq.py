"""AWQ: channels that carry large activations are scaled up before rounding.

Lin et al. 2023, arXiv:2306.00978. The inverse of a scale is folded into the op that produces the
input, as the layer's spec names it: a norm, or rows of a linear layer (v before the attention's
output projection, up before down: out = up · silu(gate) is linear in up). So the layer computes the
same and costs the same. Under GQA the scales are one vector for all q heads of a KV head. A site
whose input no linear op produces (GPT-2's activation) is not scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from modelmill.nn.layer_spec import NormSpec, ScaleFoldRows
from modelmill.quant.calibration_state import QuantizableLayer
from modelmill.quant.recipe import InputStatistics, PrepareResult
from modelmill.weights.dense import DenseWeight as Dense

ALPHA_STEPS = 20
_MIN_CHANNEL_SHARE = 1e-4  # of the largest channel
_NUM_SEARCH_WEIGHT_ROWS = 256  # rows of a weight that the search uses
RoundWeight = Callable[[torch.Tensor, InputStatistics], torch.Tensor]


def search_and_fold_scales(
    block: QuantizableLayer,
    statistics: Mapping[str, InputStatistics],
    round_weight: RoundWeight,
    dtype: torch.dtype,
) -> PrepareResult:
    """Search the scales of all sites and fold them in.

    Sites go in the layer's fold order: those that change weights which read a norm come first.
    round_weight: quantizes and dequantizes a weight, for the search.
    """
    done = PrepareResult()
    for site in block.spec.scale_fold_order:
        weight = block.stacked_site_weight(site)
        scales, alpha, gain = search_awq_scales(
            weight, average_kv_group_statistics(block, site, statistics[site]), round_weight
        )
        done.facts[site] = {"alpha": alpha, "error": gain}
        if alpha > 0:
            done.scales[site] = fold_scales(
                block, site, average_over_kv_group(block, site, scales), dtype
            )
    for site in block.sites:
        done.facts.setdefault(site, {"alpha": 0.0})
    return done


def can_fold_scales(block: QuantizableLayer, site: str) -> bool:
    """Return whether a linear op produces a site's input."""
    return block.spec.scale_fold_target(site) is not None


def search_awq_scales(
    weight: torch.Tensor, statistics: InputStatistics, round_weight: RoundWeight
) -> tuple[torch.Tensor, float, float]:
    """Search the α whose rounded outputs have the smallest error.

    Returns:
        Scales [K], α, and the error relative to the error without scales.
    """
    weight = weight[:: max(1, len(weight) // _NUM_SEARCH_WEIGHT_ROWS)]
    best = float("inf")
    chosen = torch.ones_like(statistics.mean_abs)
    alpha = 0.0
    first = 0.0
    for step in range(ALPHA_STEPS):
        scales = awq_scales_for_alpha(statistics.mean_abs, step / ALPHA_STEPS)
        scaled_statistics = divide_statistics_by_scales(statistics, scales)
        wide = weight * scales
        off = round_weight(wide, scaled_statistics) - wide
        error = float(((off @ scaled_statistics.hessian) * off).sum())
        first = error if step == 0 else first
        if error < best:
            best = error
            chosen = scales
            alpha = step / ALPHA_STEPS
    return chosen, alpha, best / first if first > 0 else 1.0


def awq_scales_for_alpha(mean_abs: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return mean|X|^α divided by √(max · min)."""
    scales = mean_abs.clamp(min=_MIN_CHANNEL_SHARE * float(mean_abs.max().clamp(min=1e-30))).pow(
        alpha
    )
    return scales / (scales.max() * scales.min()).sqrt()


def divide_statistics_by_scales(
    statistics: InputStatistics, scales: torch.Tensor
) -> InputStatistics:
    """Return the statistics of inputs divided by ``scales``."""
    s = statistics
    hessian = s.hessian / scales[:, None] / scales
    mean, peak, low, high = (
        v / scales for v in (s.mean_abs, s.max_abs, s.min_values, s.max_values)
    )
    return InputStatistics(s.num_tokens, hessian, mean, peak, low, high, s.input_samples / scales)


def average_kv_group_statistics(
    block: QuantizableLayer, site: str, statistics: InputStatistics
) -> InputStatistics:
    """Average the statistics over the q heads of a KV head, where folding requires it."""
    if block.producer_head_groups(site) is None:
        return statistics
    s = statistics
    return InputStatistics(
        s.num_tokens,
        s.hessian,
        average_over_kv_group(block, site, s.mean_abs),
        s.max_abs,
        s.min_values,
        s.max_values,
        s.input_samples,
    )


def average_over_kv_group(block: QuantizableLayer, site: str, vector: torch.Tensor) -> torch.Tensor:
    """Average a vector over the q heads that share a KV head, where the site has such."""
    groups = block.producer_head_groups(site)
    if groups is None:
        return vector
    each = groups.reshape_by_group(vector)
    return each.mean(1, keepdim=True).expand_as(each).reshape(-1)


def fold_scales(
    block: QuantizableLayer, site: str, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Divide a site's input by ``scales`` in its producer and multiply its weight's columns.

    A norm is stored in ``dtype``: the columns are multiplied by the scales after this rounding.

    Returns:
        What the input was divided by.
    """
    producer = block.spec.scale_fold_target(site)
    if isinstance(producer, NormSpec):
        norm = block.layer.get_submodule(producer.path)
        old = norm.weight
        assert isinstance(old, torch.Tensor)
        new = (old / scales).to(dtype).float()
        scales = torch.where(new != 0, old / new, scales)
        norm.weight = torch.where(old != 0, new, old)
        bias = getattr(norm, "bias", None)
        if isinstance(bias, torch.Tensor):
            norm.bias = (bias / scales).to(dtype).float()
    else:
        assert producer is not None, f"a site that can be folded, not {site}"
        _divide_producer_rows(block, producer, scales, dtype)
    for reads in block.site_linears(site).values():
        reads.weight = Dense(reads.weight.dequantize() * scales)
    return scales


def _divide_producer_rows(
    block: QuantizableLayer, producer: ScaleFoldRows, scales: torch.Tensor, dtype: torch.dtype
) -> None:
    """Divide the rows of a weight and its bias that produce a site's input."""
    if producer.groups is not None:
        scales = producer.groups.reshape_by_group(scales)[:, 0].reshape(-1)
    rows = slice(*block.spec.linear_at_path(producer.linear).part_row_range(producer.part))
    makes = block.linear_by_path(producer.linear)
    weight = makes.weight.dequantize().clone()
    weight[rows] /= scales[:, None]
    makes.weight = Dense(weight)
    if makes.bias is not None:
        bias = makes.bias.clone()
        bias[rows] /= scales
        makes.bias = bias.to(dtype).float()
