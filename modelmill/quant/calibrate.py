"""Layer by layer through the model: statistics of the inputs, the recipe, and on with what the recipe made.

In memory are one layer, its statistics and the calibration tokens between two layers. A layer sees inputs that the
quantized layers before it have computed, and inside a layer each site those of the quantized sites before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from modelmill.core.errors import UsageError
from modelmill.quant.block import SITES, Block, Flow
from modelmill.quant.recipe import Prepared, Recipe, Scales, Statistics
from modelmill.weights.held import HeldWeight, pack, seen

ROWS = 512  # inputs kept as they are, for searches on outputs
PROBE_BATCHES = 4  # batches that what is prepared before rounding is decided on
TRIAL_TOKENS = 1024  # that a layer is tried out on, again and again
OUTLIERS = 4  # channels told in the report
LEAST_TOKENS = 128


def check_ids(ids: Sequence[Sequence[int]], vocab: int, name: str = "the calibration data") -> None:
    """Raises UsageError for calibration ids that tell too little or are no tokens of the model; name: where from."""
    total = sum(map(len, ids))
    if not ids or not total:
        raise UsageError(f"{name} is empty: no text in it gives a token; give one that has texts, or none for our own")
    if total < LEAST_TOKENS:
        raise UsageError(
            f"{name} is too short: {total} tokens are read, at least {LEAST_TOKENS} are needed; give more text, or a "
            "larger --calibration-samples, --calibration-length or --max-model-len"
        )
    if any(not 0 <= i < vocab for one in ids for i in one):
        raise UsageError(f"{name} holds token ids outside 0…{vocab - 1}: it is of another tokenizer")


def quantize_layer(
    block: Block, recipe: Recipe, flow: Flow | None, *, dtype: torch.dtype, where: str
) -> tuple[dict[str, Any], Scales]:
    """Leave a layer of dense float32 weights with held ones; returns the facts by linear module, and what was folded.

    flow: the calibration tokens before the layer, afterwards behind it; None for recipes without calibration. dtype: of
    norms and biases as stored. where: the layer's name, for errors.
    """
    prepared, moments = Prepared(), getattr(recipe, "moments", True)
    if flow is not None and recipe.prepares:
        survey = _survey(block, flow.fork(PROBE_BATCHES), where, moments=moments)
        if getattr(recipe, "searches", False):
            prepared = recipe.search(block, survey, flow.few(TRIAL_TOKENS), dtype)  # type: ignore[attr-defined]
        else:
            prepared = recipe.prepare(block, survey, dtype)
    facts: dict[str, Any] = {}
    for site in SITES:
        statistics = None
        if flow is not None:
            flow.reach(block, site)
            statistics = collect(flow.given(), f"{where}.{block.names[site]}", moments=moments)
        linear = block.linear(site)
        weight = linear.held.dense()
        own = recipe.of(block.names[site]) if hasattr(recipe, "of") else recipe
        held = prepared.hold.get(site, own.hold)(weight, statistics)
        facts[block.names[site]] = judge(weight, held, own, statistics) | prepared.facts.get(site, {})
        linear.held = held
    if flow is not None:
        flow.leave(block)
    return facts, prepared.scales


def _survey(block: Block, flow: Flow, where: str, *, moments: bool) -> dict[str, Statistics]:
    """Statistics of all sites of a layer as it is."""
    found = {}
    for site in SITES:
        flow.reach(block, site)
        found[site] = collect(flow.given(), f"{where}.{block.names[site]}", moments=moments)
    return found


def collect(inputs: Iterable[torch.Tensor], where: str, *, moments: bool = True) -> Statistics:
    """Statistics of batches of inputs [T, K]; without ``moments`` the Hessian is left out ([0, 0]): it takes longest.

    Raises UsageError where inputs hold NaN or infinity.
    """
    found: Statistics | None = None
    kept = []
    for x in inputs:
        size = x.abs()
        products = x.T @ x if moments else x.new_zeros(0, 0)
        now = Statistics(len(x), products, size.sum(0), size.amax(0), x.amin(0), x.amax(0), x[:0])
        found = now if found is None else _joined(found, now)
        kept.append(x)
    assert found is not None, "a flow has batches"
    found.hessian /= found.tokens
    found.mean_abs /= found.tokens
    every = max(1, found.tokens // ROWS)
    found.rows = torch.cat([x[::every] for x in kept])[:ROWS]
    if not bool(torch.isfinite(found.mean_abs).all() & torch.isfinite(found.hessian).all()):
        raise UsageError(
            f"the calibration data makes NaN or infinite inputs at {where}: the checkpoint or the data is damaged"
        )
    return found


def _joined(a: Statistics, b: Statistics) -> Statistics:
    a.hessian += b.hessian
    a.mean_abs += b.mean_abs
    ends = torch.maximum(a.max_abs, b.max_abs), torch.minimum(a.low, b.low), torch.maximum(a.high, b.high)
    return Statistics(a.tokens + b.tokens, a.hessian, a.mean_abs, *ends, a.rows)


def judge(weight: torch.Tensor, held: HeldWeight, recipe: Recipe, statistics: Statistics | None) -> dict[str, Any]:
    """What rounding did to one weight: errors as shares of the outputs (of the weight where nothing was calibrated).

    before: plain rounding to nearest; after: what is held. outliers: the input channels that stand out most, and by how
    many times the median channel.
    """
    plain = pack(recipe.kind, weight, torch.float32, **recipe.layout)
    stored = sum(t.numel() * t.element_size() for t in held.tensors().values())
    facts: dict[str, Any] = {
        "before": output_error(weight, plain, statistics),
        "after": output_error(weight, held, statistics),
        "bits": round(8 * stored / weight.numel(), 3),
    }
    facts |= getattr(held, "told", dict)()
    if statistics is not None:
        peak = statistics.max_abs
        channels = peak.argsort(descending=True)[:OUTLIERS].tolist()
        median = float(peak.median().clamp(min=1e-30))
        facts["outliers"] = [[channel, short(float(peak[channel]) / median)] for channel in channels]
    return facts


def output_error(weight: torch.Tensor, other: HeldWeight, statistics: Statistics | None) -> float:
    """What rounding does to a weight's outputs (to the weight, without statistics), as a share of them."""
    off = weight - other.dense()
    if statistics is not None and hasattr(other, "seen"):
        right = statistics.rows @ weight.T
        found = seen(other, statistics.rows) @ other.dense().T
        return short(float((found - right).norm() / right.norm().clamp(min=1e-30)))
    if statistics is None:
        return short(float(off.norm() / weight.norm().clamp(min=1e-30)))
    lost, whole = (float(((w @ statistics.hessian) * w).sum()) for w in (off, weight))
    return short((max(lost, 0.0) / whole) ** 0.5 if whole > 0 else 0.0)


def short(value: float) -> float:
    """Three digits."""
    return float(f"{value:.3g}")
