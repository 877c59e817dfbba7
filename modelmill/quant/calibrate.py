"""Layer by layer through the model: statistics of the inputs, the recipe, and on with what the
recipe made.

In memory are one layer, its statistics and the calibration tokens between two layers. A layer sees
inputs that the quantized layers before it have computed, and inside a layer each site those of the
quantized sites before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from modelmill.core.errors import UsageError
from modelmill.quant.calibration_state import SITES, CalibrationState, QuantizableLayer
from modelmill.quant.recipe import InputStatistics, PrepareResult, Recipe, Scales
from modelmill.weights.base import WeightFormat, fake_quantize, pack

SAMPLE_ROWS = 512  # inputs kept as they are, for searches on outputs
PROBE_BATCHES = 4  # batches that what is prepared before rounding is decided on
TRIAL_TOKENS = 1024  # that a layer is tried out on, again and again
NUM_OUTLIERS = 4  # channels told in the report
MIN_TOKENS = 128


def check_calibration_ids(
    ids: Sequence[Sequence[int]], vocab: int, source_name: str = "the calibration data"
) -> None:
    """Raises UsageError for calibration ids that tell too little or are no tokens of the model;
    source_name: where from.
    """
    total = sum(map(len, ids))
    if not ids or not total:
        raise UsageError(
            f"{source_name} is empty: no text in it gives a token; give one that has texts, or "
            "none for our own"
        )
    if total < MIN_TOKENS:
        raise UsageError(
            f"{source_name} is too short: {total} tokens are read, at least {MIN_TOKENS} are "
            "needed; give more text, "
            "or a larger --calibration-samples, --calibration-length or --max-model-len"
        )
    if any(not 0 <= i < vocab for one in ids for i in one):
        raise UsageError(
            f"{source_name} holds token ids outside 0…{vocab - 1}: it is of another tokenizer"
        )


def quantize_layer(
    block: QuantizableLayer,
    recipe: Recipe,
    calibration: CalibrationState | None,
    *,
    dtype: torch.dtype,
    layer_name: str,
) -> tuple[dict[str, Any], Scales]:
    """Leave a layer of dense float32 weights with held ones; returns the facts by linear module,
    and what was folded.

    calibration: the tokens before the layer, afterwards behind it; None for recipes without
    calibration. dtype: of norms and biases as stored. layer_name: the layer's name, for errors.
    """
    prepared, needs_hessian = PrepareResult(), getattr(recipe, "needs_hessian", True)
    if calibration is not None and recipe.needs_prepare:
        survey = _collect_all_sites(
            block, calibration.fork(PROBE_BATCHES), layer_name, needs_hessian=needs_hessian
        )
        if getattr(recipe, "needs_search", False):
            prepared = recipe.search_layer(block, survey, calibration.subset(TRIAL_TOKENS), dtype)  # type: ignore[attr-defined]
        else:
            prepared = recipe.prepare(block, survey, dtype)
    facts: dict[str, Any] = {}
    for site in SITES:
        statistics = None
        if calibration is not None:
            calibration.forward_to(block, site)
            statistics = collect_statistics(
                calibration.site_inputs(),
                f"{layer_name}.{block.linear_paths[site]}",
                needs_hessian=needs_hessian,
            )
        linear = block.linear(site)
        weight = linear.weight.dense()
        linear_recipe = (
            recipe.recipe_for(block.linear_paths[site]) if hasattr(recipe, "recipe_for") else recipe
        )
        quantized = prepared.quantize_by_site.get(site, linear_recipe.quantize)(weight, statistics)
        facts[block.linear_paths[site]] = quantization_facts(
            weight, quantized, linear_recipe, statistics
        ) | prepared.facts.get(site, {})
        linear.weight = quantized
    if calibration is not None:
        calibration.finish_layer(block)
    return facts, prepared.scales


def _collect_all_sites(
    block: QuantizableLayer, calibration: CalibrationState, layer_name: str, *, needs_hessian: bool
) -> dict[str, InputStatistics]:
    """Statistics of all sites of a layer as it is."""
    found = {}
    for site in SITES:
        calibration.forward_to(block, site)
        found[site] = collect_statistics(
            calibration.site_inputs(),
            f"{layer_name}.{block.linear_paths[site]}",
            needs_hessian=needs_hessian,
        )
    return found


def collect_statistics(
    inputs: Iterable[torch.Tensor], site_name: str, *, needs_hessian: bool = True
) -> InputStatistics:
    """Statistics of batches of inputs [T, K]; without ``needs_hessian`` the Hessian is left out
    ([0, 0]): it takes longest.

    Raises UsageError where inputs hold NaN or infinity.
    """
    found: InputStatistics | None = None
    kept = []
    for x in inputs:
        size = x.abs()
        products = x.T @ x if needs_hessian else x.new_zeros(0, 0)
        now = InputStatistics(
            len(x), products, size.sum(0), size.amax(0), x.amin(0), x.amax(0), x[:0]
        )
        found = now if found is None else _merge_statistics(found, now)
        kept.append(x)
    assert found is not None, "a flow has batches"
    found.hessian /= found.num_tokens
    found.mean_abs /= found.num_tokens
    every = max(1, found.num_tokens // SAMPLE_ROWS)
    found.input_samples = torch.cat([x[::every] for x in kept])[:SAMPLE_ROWS]
    if not bool(torch.isfinite(found.mean_abs).all() & torch.isfinite(found.hessian).all()):
        raise UsageError(
            f"the calibration data makes NaN or infinite inputs at {site_name}: the checkpoint or "
            "the data is damaged"
        )
    return found


def _merge_statistics(a: InputStatistics, b: InputStatistics) -> InputStatistics:
    a.hessian += b.hessian
    a.mean_abs += b.mean_abs
    ends = (
        torch.maximum(a.max_abs, b.max_abs),
        torch.minimum(a.min_values, b.min_values),
        torch.maximum(a.max_values, b.max_values),
    )
    return InputStatistics(
        a.num_tokens + b.num_tokens, a.hessian, a.mean_abs, *ends, a.input_samples
    )


def quantization_facts(
    weight: torch.Tensor,
    quantized: WeightFormat,
    recipe: Recipe,
    statistics: InputStatistics | None,
) -> dict[str, Any]:
    """What rounding did to one weight: errors as shares of the outputs (of the weight where nothing
    was calibrated).

    before: plain rounding to nearest; after: what is held. outliers: the input channels that stand
    out most, and by how many times the median channel.
    """
    plain = pack(recipe.weight_format, weight, torch.float32, **recipe.pack_options)
    stored = sum(t.numel() * t.element_size() for t in quantized.tensors().values())
    facts: dict[str, Any] = {
        "before": output_error(weight, plain, statistics),
        "after": output_error(weight, quantized, statistics),
        "bits": round(8 * stored / weight.numel(), 3),
    }
    facts |= getattr(quantized, "cluster_stats", dict)()
    if statistics is not None:
        peak = statistics.max_abs
        channels = peak.argsort(descending=True)[:NUM_OUTLIERS].tolist()
        median = float(peak.median().clamp(min=1e-30))
        facts["outliers"] = [
            [channel, round_digits(float(peak[channel]) / median)] for channel in channels
        ]
    return facts


def output_error(
    weight: torch.Tensor, quantized: WeightFormat, statistics: InputStatistics | None
) -> float:
    """What rounding does to a weight's outputs (to the weight, without statistics), as a share of
    them.
    """
    off = weight - quantized.dense()
    if statistics is not None and hasattr(quantized, "fake_quantize"):
        right = statistics.input_samples @ weight.T
        found = fake_quantize(quantized, statistics.input_samples) @ quantized.dense().T
        return round_digits(float((found - right).norm() / right.norm().clamp(min=1e-30)))
    if statistics is None:
        return round_digits(float(off.norm() / weight.norm().clamp(min=1e-30)))
    lost, whole = (float(((w @ statistics.hessian) * w).sum()) for w in (off, weight))
    return round_digits((max(lost, 0.0) / whole) ** 0.5 if whole > 0 else 0.0)


def round_digits(value: float) -> float:
    """Three digits."""
    return float(f"{value:.3g}")
