"""Quantizes a model layer by layer: collects input statistics, applies the recipe, continues.

In memory are one layer, its statistics and the calibration tokens between two layers. A layer's
inputs are computed by the quantized layers before it, and inside a layer those of a site by the
quantized sites before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from modelmill.core.errors import UsageError
from modelmill.quant.calibration_state import CalibrationState, QuantizableLayer
from modelmill.quant.recipe import InputStatistics, PrepareResult, Recipe, Scales
from modelmill.weights.base import WeightFormat, pack_as_format

NUM_INPUT_SAMPLES = 512  # rows of inputs kept unchanged, for searches on outputs
PREPARE_BATCHES = 4  # batches used to choose what is prepared before rounding
SEARCH_TOKENS = 1024  # tokens on which a layer is tried repeatedly
NUM_REPORTED_OUTLIERS = 4  # channels listed in the report


def quantize_layer(
    block: QuantizableLayer,
    recipe: Recipe,
    calibration: CalibrationState | None,
    *,
    dtype: torch.dtype,
    layer_name: str,
) -> tuple[dict[str, Any], Scales]:
    """Quantize a layer of dense float32 weights in place.

    Args:
        block: the layer.
        recipe: the recipe.
        calibration: the tokens before the layer, advanced past it; None for recipes without
            calibration.
        dtype: dtype in which norms and biases are stored.
        layer_name: the layer's name, for errors.

    Returns:
        The facts by linear module, and what was folded.
    """
    prepared, needs_hessian = PrepareResult(), recipe.needs_hessian
    if calibration is not None and recipe.needs_prepare:
        survey = _collect_all_site_statistics(
            block, calibration.fork(PREPARE_BATCHES), layer_name, needs_hessian=needs_hessian
        )
        if recipe.needs_search:
            prepared = recipe.prepare_layer_by_search(
                block, survey, calibration.copy_first_sequences(SEARCH_TOKENS), dtype
            )
        else:
            prepared = recipe.prepare_layer(block, survey, dtype)
    facts: dict[str, Any] = {}
    for site in block.sites:
        statistics = None
        if calibration is not None:
            statistics = _collect_site_statistics(
                block, calibration, site, layer_name, needs_hessian=needs_hessian
            )
        for path, linear in block.site_linears(site).items():
            weight = linear.weight.dequantize()
            linear_recipe = recipe.module_recipe(path, block.spec.find_site(site))
            quantize = prepared.quantize_by_site.get(site, linear_recipe.quantize)
            quantized = quantize(weight, statistics)
            facts[path] = measure_quantization_errors(
                weight, quantized, linear_recipe, statistics
            ) | prepared.facts.get(site, {})
            expert = block.spec.linear_at_path(path).expert
            if calibration is not None and expert is not None:
                facts[path]["expert_tokens"] = calibration.num_tokens_for_expert(expert)
            linear.weight = quantized
    if calibration is not None:
        calibration.forward_to_layer_end(block)
        if not calibration.is_finite():
            raise _add_non_finite_module_to_error(
                _non_finite_error(f"the end of {layer_name}"), calibration, layer_name
            )
    return facts, prepared.scales


def _collect_all_site_statistics(
    block: QuantizableLayer, calibration: CalibrationState, layer_name: str, *, needs_hessian: bool
) -> dict[str, InputStatistics]:
    """Collect the statistics of all sites of an unquantized layer."""
    statistics = {}
    for site in block.sites:
        statistics[site] = _collect_site_statistics(
            block, calibration, site, layer_name, needs_hessian=needs_hessian
        )
    return statistics


def _collect_site_statistics(
    block: QuantizableLayer,
    calibration: CalibrationState,
    site: str,
    layer_name: str,
    *,
    needs_hessian: bool,
) -> InputStatistics:
    """Collect the statistics of one site; the state is forwarded to it.

    Raises:
        UsageError: if an input is NaN or infinite; it names the module from which that comes.
    """
    calibration.forward_to_site(block, site)
    try:
        return collect_input_statistics(
            calibration.site_inputs(),
            f"{layer_name}.{block.format_site_linear_names(site)}",
            needs_hessian=needs_hessian,
        )
    except UsageError as error:
        raise _add_non_finite_module_to_error(error, calibration, layer_name) from None


def _add_non_finite_module_to_error(
    error: UsageError, calibration: CalibrationState, layer_name: str
) -> UsageError:
    """Return the error with the module of the layer from which a NaN or infinite value comes."""
    source = calibration.first_non_finite_module()
    layer = layer_name.removeprefix("layers.")
    return error if source is None else UsageError(f"layer {layer}, module {source}: {error}")


def _non_finite_error(place: str) -> UsageError:
    return UsageError(
        f"the calibration data makes NaN or infinite inputs at {place}: the checkpoint or the data "
        "is damaged, or a module is wrong"
    )


def collect_input_statistics(
    inputs: Iterable[torch.Tensor], site_name: str, *, needs_hessian: bool = True
) -> InputStatistics:
    """Collect the statistics of batches of inputs [T, K].

    needs_hessian: False leaves the Hessian out ([0, 0]), which takes most of the time.

    Raises:
        UsageError: if an input is NaN or infinite.
    """
    statistics: InputStatistics | None = None
    kept = []
    for x in inputs:
        size = x.abs()
        products = x.T @ x if needs_hessian else x.new_zeros(0, 0)
        now = InputStatistics(
            len(x), products, size.sum(0), size.amax(0), x.amin(0), x.amax(0), x[:0]
        )
        statistics = now if statistics is None else _merge_statistics(statistics, now)
        kept.append(x)
    assert statistics is not None, "a calibration state has batches"
    statistics.hessian /= statistics.num_tokens
    statistics.mean_abs /= statistics.num_tokens
    every = max(1, statistics.num_tokens // NUM_INPUT_SAMPLES)
    statistics.input_samples = torch.cat([x[::every] for x in kept])[:NUM_INPUT_SAMPLES]
    if not bool(
        torch.isfinite(statistics.mean_abs).all() & torch.isfinite(statistics.hessian).all()
    ):
        raise _non_finite_error(site_name)
    return statistics


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


def measure_quantization_errors(
    weight: torch.Tensor,
    quantized: WeightFormat,
    recipe: Recipe,
    statistics: InputStatistics | None,
) -> dict[str, Any]:
    """Return the effect of quantizing one weight as errors relative to the outputs.

    Without calibration the errors are relative to the weight. before: plain rounding to nearest;
    after: the stored weight. outliers: the input channels with the largest values, and their ratio
    to the median channel. outside_range: share of the sampled inputs that go far beyond the static
    ranges, of formats that have such.
    """
    plain = pack_as_format(recipe.weight_format, weight, torch.float32, **recipe.pack_options)
    stored = sum(t.numel() * t.element_size() for t in quantized.tensors().values())
    facts: dict[str, Any] = {
        "before": weight_output_error(weight, plain, statistics),
        "after": weight_output_error(weight, quantized, statistics),
        "bits": round(8 * stored / weight.numel(), 3),
    }
    facts |= quantized.cluster_counts()
    if statistics is not None:
        outside = quantized.input_row_outside_range_mask(statistics.input_samples)
        if outside is not None:
            facts["outside_range"] = round_to_3_significant_digits(float(outside.float().mean()))
        peak = statistics.max_abs
        channels = peak.argsort(descending=True)[:NUM_REPORTED_OUTLIERS].tolist()
        median = float(peak.median().clamp(min=1e-30))
        facts["outliers"] = [
            [channel, round_to_3_significant_digits(float(peak[channel]) / median)]
            for channel in channels
        ]
    return facts


def weight_output_error(
    weight: torch.Tensor, quantized: WeightFormat, statistics: InputStatistics | None
) -> float:
    """Return the relative error of the quantized weight's outputs, or of the weight itself.

    Without statistics it is the error of the weight.
    """
    off = weight - quantized.dequantize()
    if statistics is not None and quantized.QUANTIZES_INPUT:
        right = statistics.input_samples @ weight.T
        outputs = quantized.fake_quantize_input(statistics.input_samples) @ quantized.dequantize().T
        return round_to_3_significant_digits(
            float((outputs - right).norm() / right.norm().clamp(min=1e-30))
        )
    if statistics is None:
        return round_to_3_significant_digits(float(off.norm() / weight.norm().clamp(min=1e-30)))
    lost, whole = (float(((w @ statistics.hessian) * w).sum()) for w in (off, weight))
    return round_to_3_significant_digits((max(lost, 0.0) / whole) ** 0.5 if whole > 0 else 0.0)


def round_to_3_significant_digits(value: float) -> float:
    """Round to three digits."""
    return float(f"{value:.3g}")
