"""AWQ (Lin et al. 2023, arXiv:2306.00978): channels that carry large activations are scaled up before rounding.

The inverse of a scale is folded into what makes the input: the norm before qkv and gate/up, the v rows before o, the up
rows before down (out = up · silu(gate) is linear in up). So the layer computes the same and costs the same. Under GQA
the scales of o are one vector for all q heads of a KV head. Where nothing linear makes the input (GPT-2's activation)
a site is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from modelmill.quant.block import SITES, Block
from modelmill.quant.recipe import Prepared, Statistics
from modelmill.weights.dense import Held as Dense

STEPS = 20
_FLOOR = 1e-4  # of the largest channel
_ROWS = 256  # of a weight, that the search looks at
Round = Callable[[torch.Tensor, Statistics], torch.Tensor]


def scale_block(block: Block, statistics: Mapping[str, Statistics], round_: Round, dtype: torch.dtype) -> Prepared:
    """Search the scales of all sites and fold them in. round_: a weight as it would be rounded, for the search.

    o and down go first, since folding them changes the weights that read the norms' outputs.
    """
    done = Prepared()
    for site in ("o", "down", "qkv", "up"):
        if not foldable(block, site):
            continue
        weight = block.linear(site).held.dense()
        scales, alpha, gain = search(weight, shared(block, site, statistics[site]), round_)
        done.facts[site] = {"alpha": alpha, "error": gain}
        if alpha > 0:
            done.scales[site] = fold(block, site, tie(block, site, scales), dtype)
    for site in SITES:
        done.facts.setdefault(site, {"alpha": 0.0})
    return done


def foldable(block: Block, site: str) -> bool:
    """Whether something linear makes a site's input."""
    return site != "down" or block.gated


def search(weight: torch.Tensor, statistics: Statistics, round_: Round) -> tuple[torch.Tensor, float, float]:
    """(scales [K], α, error as a share of the error without scales): the α whose rounded outputs err least."""
    weight = weight[:: max(1, len(weight) // _ROWS)]
    best, chosen, alpha, first = float("inf"), torch.ones_like(statistics.mean_abs), 0.0, 0.0
    for step in range(STEPS):
        scales = scales_for(statistics.mean_abs, step / STEPS)
        seen = scaled(statistics, scales)
        wide = weight * scales
        off = round_(wide, seen) - wide
        error = float(((off @ seen.hessian) * off).sum())
        first = error if step == 0 else first
        if error < best:
            best, chosen, alpha = error, scales, step / STEPS
    return chosen, alpha, best / first if first > 0 else 1.0


def scales_for(mean_abs: torch.Tensor, alpha: float) -> torch.Tensor:
    """mean|X|^α over √(max · min)."""
    scales = mean_abs.clamp(min=_FLOOR * float(mean_abs.max().clamp(min=1e-30))).pow(alpha)
    return scales / (scales.max() * scales.min()).sqrt()


def scaled(statistics: Statistics, scales: torch.Tensor) -> Statistics:
    """The statistics of inputs divided by ``scales``."""
    s = statistics
    hessian = s.hessian / scales[:, None] / scales
    mean, peak, low, high = (v / scales for v in (s.mean_abs, s.max_abs, s.low, s.high))
    return Statistics(s.tokens, hessian, mean, peak, low, high, s.rows / scales)


def shared(block: Block, site: str, statistics: Statistics) -> Statistics:
    """For "o": the mean over the q heads of a KV head, so that the search sees what folding can do."""
    if site != "o":
        return statistics
    s = statistics
    return Statistics(s.tokens, s.hessian, tie(block, site, s.mean_abs), s.max_abs, s.low, s.high, s.rows)


def tie(block: Block, site: str, vector: torch.Tensor) -> torch.Tensor:
    """For "o", a vector over all q heads made the same (by mean) for those that share a KV head."""
    if site != "o":
        return vector
    heads = block.heads
    each = vector.view(heads.kv, heads.q // heads.kv, heads.dim)
    return each.mean(1, keepdim=True).expand_as(each).reshape(-1)


def fold(block: Block, site: str, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Divide a site's input by ``scales`` where it is made, multiply its weight's columns; returns what was divided by.

    A norm is stored in ``dtype``: what its rounding makes of the scales is what the columns get.
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
            block, "qkv", (block.heads.q + block.heads.kv) * block.heads.dim, _per_kv_head(block, scales), dtype
        )
    else:
        _divide_rows(block, "up", len(scales), scales, dtype)
    reads = block.linear(site)
    reads.held = Dense(reads.held.dense() * scales)
    return scales


def _per_kv_head(block: Block, scales: torch.Tensor) -> torch.Tensor:
    heads = block.heads
    return scales.view(heads.kv, heads.q // heads.kv, heads.dim)[:, 0].reshape(-1)


def _divide_rows(block: Block, site: str, first: int, scales: torch.Tensor, dtype: torch.dtype) -> None:
    """The last rows of a fused weight and its bias, from ``first`` on."""
    makes = block.linear(site)
    weight = makes.held.dense().clone()
    weight[first:] /= scales[:, None]
    makes.held = Dense(weight)
    if makes.bias is not None:
        bias = makes.bias.clone()
        bias[first:] /= scales
        makes.bias = bias.to(dtype).float()
