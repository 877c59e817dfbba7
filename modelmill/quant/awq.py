"""AWQ: channels that carry large activations are scaled up before rounding.

Lin et al. 2023, arXiv:2306.00978. The inverse of a scale is folded into the op that produces the
input: the norm before qkv and gate/up, the v rows before o, the up rows before down (out = up ·
silu(gate) is linear in up). So the layer computes the same and costs the same. Under GQA the scales
of o are one vector for all q heads of a KV head. A site whose input no linear op produces (GPT-2's
activation) is not scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from modelmill.quant.calibration_state import SITES, QuantizableLayer
from modelmill.quant.recipe import InputStatistics, PrepareResult
from modelmill.weights.dense import DenseWeight as Dense

ALPHA_STEPS = 20
_MIN_CHANNEL_SHARE = 1e-4  # of the largest channel
_SEARCH_ROWS = 256  # rows of a weight that the search uses
RoundWeight = Callable[[torch.Tensor, InputStatistics], torch.Tensor]


def scale_layer(
    block: QuantizableLayer,
    statistics: Mapping[str, InputStatistics],
    round_weight: RoundWeight,
    dtype: torch.dtype,
) -> PrepareResult:
    """Search the scales of all sites and fold them in.

    o and down go first, since folding them changes the weights that read the norms' outputs.
    round_weight: quantizes and dequantizes a weight, for the search.
    """
    done = PrepareResult()
    for site in ("o", "down", "qkv", "up"):
        if not is_foldable(block, site):
            continue
        weight = block.linear(site).weight.dense()
        scales, alpha, gain = search_scales(
            weight, average_kv_group_statistics(block, site, statistics[site]), round_weight
        )
        done.facts[site] = {"alpha": alpha, "error": gain}
        if alpha > 0:
            done.scales[site] = fold_scales(
                block, site, average_kv_group(block, site, scales), dtype
            )
    for site in SITES:
        done.facts.setdefault(site, {"alpha": 0.0})
    return done


def is_foldable(block: QuantizableLayer, site: str) -> bool:
    """Return whether a linear op produces a site's input."""
    return site != "down" or block.has_gated_mlp


def search_scales(
    weight: torch.Tensor, statistics: InputStatistics, round_weight: RoundWeight
) -> tuple[torch.Tensor, float, float]:
    """Search the α whose rounded outputs have the smallest error.

    Returns:
        Scales [K], α, and the error relative to the error without scales.
    """
    weight = weight[:: max(1, len(weight) // _SEARCH_ROWS)]
    best = float("inf")
    chosen = torch.ones_like(statistics.mean_abs)
    alpha = 0.0
    first = 0.0
    for step in range(ALPHA_STEPS):
        scales = awq_scales(statistics.mean_abs, step / ALPHA_STEPS)
        scaled_statistics = scale_statistics(statistics, scales)
        wide = weight * scales
        off = round_weight(wide, scaled_statistics) - wide
        error = float(((off @ scaled_statistics.hessian) * off).sum())
        first = error if step == 0 else first
        if error < best:
            best = error
            chosen = scales
            alpha = step / ALPHA_STEPS
    return chosen, alpha, best / first if first > 0 else 1.0


def awq_scales(mean_abs: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return mean|X|^α divided by √(max · min)."""
    scales = mean_abs.clamp(min=_MIN_CHANNEL_SHARE * float(mean_abs.max().clamp(min=1e-30))).pow(
        alpha
    )
    return scales / (scales.max() * scales.min()).sqrt()


def scale_statistics(statistics: InputStatistics, scales: torch.Tensor) -> InputStatistics:
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
    """For "o", average the statistics over the q heads of a KV head, as folding requires."""
    if site != "o":
        return statistics
    s = statistics
    return InputStatistics(
        s.num_tokens,
        s.hessian,
        average_kv_group(block, site, s.mean_abs),
        s.max_abs,
        s.min_values,
        s.max_values,
        s.input_samples,
    )


def average_kv_group(block: QuantizableLayer, site: str, vector: torch.Tensor) -> torch.Tensor:
    """For "o", average a vector over the q heads that share a KV head."""
    if site != "o":
        return vector
    heads = block.heads
    each = vector.view(heads.num_kv_heads, heads.num_q_heads // heads.num_kv_heads, heads.head_dim)
    return each.mean(1, keepdim=True).expand_as(each).reshape(-1)


def fold_scales(
    block: QuantizableLayer, site: str, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Divide a site's input by ``scales`` in its producer and multiply its weight's columns.

    A norm is stored in ``dtype``: the columns are multiplied by the scales after this rounding.

    Returns:
        What the input was divided by.
    """
    norm = block.norm(site)
    if norm is not None:
        old = norm.weight
        assert isinstance(old, torch.Tensor)
        new = (old / scales).to(dtype).float()
        scales = torch.where(new != 0, old / new, scales)
        norm.weight = torch.where(old != 0, new, old)
        bias = getattr(norm, "bias", None)
        if isinstance(bias, torch.Tensor):
            norm.bias = (bias / scales).to(dtype).float()
    elif site == "o":
        _divide_rows(
            block,
            "qkv",
            (block.heads.num_q_heads + block.heads.num_kv_heads) * block.heads.head_dim,
            _per_kv_head(block, scales),
            dtype,
        )
    else:
        _divide_rows(block, "up", len(scales), scales, dtype)
    reads = block.linear(site)
    reads.weight = Dense(reads.weight.dense() * scales)
    return scales


def _per_kv_head(block: QuantizableLayer, scales: torch.Tensor) -> torch.Tensor:
    heads = block.heads
    return scales.view(heads.num_kv_heads, heads.num_q_heads // heads.num_kv_heads, heads.head_dim)[
        :, 0
    ].reshape(-1)


def _divide_rows(
    block: QuantizableLayer, site: str, first: int, scales: torch.Tensor, dtype: torch.dtype
) -> None:
    """Divide the last rows of a fused weight and its bias, from ``first`` on."""
    makes = block.linear(site)
    weight = makes.weight.dense().clone()
    weight[first:] /= scales[:, None]
    makes.weight = Dense(weight)
    if makes.bias is not None:
        bias = makes.bias.clone()
        bias[first:] /= scales
        makes.bias = bias.to(dtype).float()
