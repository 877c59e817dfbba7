"""W8A8 with smoothed activations: int8 weights, int8 inputs with per-token or static scales.

See quant/activation_smoothing.py. If a layer's output error exceeds the limit even with the best
smoothers, some of its matrices keep float inputs, as few as bring the error under the limit; their
weights are int8 all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from modelmill.core.config import BuildConfig
from modelmill.core.recipe_declaration import (
    ActQuantTolerances,
    FormatTolerances,
    ImageTolerances,
    RecipeDeclaration,
    RecipeOption,
)
from modelmill.quant import activation_smoothing
from modelmill.quant.calibrate import (
    collect_input_statistics,
    round_to_3_significant_digits,
    weight_output_error,
)
from modelmill.quant.calibration_state import CalibrationState, QuantizableLayer
from modelmill.quant.recipe import InputStatistics, PrepareResult, Recipe
from modelmill.weights.w8a8 import FLOAT_INPUT_MARKER, W8A8Weight

# Read from the source, without importing this file: literals only (core/recipe_declaration.py).
DECLARATION = RecipeDeclaration(
    position=3,
    weight_format="w8a8",
    docs=(
        "8 / 8 bits, per token and channel",
        "prompts and large batches count: products run in integers",
    ),
    tolerances=FormatTolerances(
        weight=(0.1, 0.3, 1e-2),
        block=(0.4, 0.4, 0.05),
        scaled_columns=True,
        act_quant=ActQuantTolerances(
            product={"float32": (2e-3, 5e-3), "float16": (7e-3, 1.4e-2), "bfloat16": (3e-2, 6e-2)},
            layer=(0.12, 0.15, 1.4e-2),
            logits=0.1,
        ),
        images=ImageTolerances(
            embedding=1e-1,
            mask_logits=2e-1,
            module={
                "float32": (2e-3, 2e-2, 1e-4),
                "float16": (2e-2, 5e-2, 3e-3),
                "bfloat16": (5e-2, 1.5e-1, 2e-2),
            },
        ),
    ),
    options={
        "activation_scales": RecipeOption(
            "token",
            "8-bit activations with a scale per token, or one static scale per tensor "
            "(smoothquant, fp8); none: not quantized (fp8)",
            choices=("token", "tensor", "none"),
        ),
        "weight_scales": RecipeOption(
            "channel",
            "one scale per output channel, or one per matrix (smoothquant, fp8)",
            choices=("channel", "tensor"),
        ),
        "alpha": RecipeOption(
            "auto",
            "share of the activations' range that is moved into the weights, 0 to 1; auto: "
            "searched",
        ),
        "max_layer_error": RecipeOption(
            0.05,
            "error of a layer's output above which some of its activations are not quantized "
            "(smoothquant)",
            type="float | None",
            above=0,
        ),
    },
)

CLIP_FACTORS = (1.0, 0.85, 0.7, 0.5, 0.3)


class SmoothQuantRecipe(Recipe):
    """Options of BuildConfig: alpha, activation_scales, weight_scales, max_layer_error."""

    weight_format = "w8a8"
    needs_calibration = needs_prepare = needs_search = True
    needs_hessian = False

    def __init__(self, config: BuildConfig) -> None:
        self.alpha = None if config.alpha == "auto" else float(config.alpha)
        self.static_input_scale, self.max_layer_error = (
            config.activation_scales == "tensor",
            config.max_layer_error,
        )
        self.per_channel = config.weight_scales == "channel"
        self.pack_options = {"per_channel": self.per_channel}

    def prepare_layer(
        self, block: QuantizableLayer, statistics: Mapping[str, InputStatistics], dtype: torch.dtype
    ) -> PrepareResult:
        """Apply one α to all sites, without a search."""
        alphas: activation_smoothing.SiteAlphas = dict.fromkeys(
            block.sites, 0.5 if self.alpha is None else self.alpha
        )
        return activation_smoothing.smoothing_result(
            block, activation_smoothing.apply_smoothing(block, statistics, alphas, dtype), alphas
        )

    def prepare_layer_by_search(
        self,
        block: QuantizableLayer,
        statistics: Mapping[str, InputStatistics],
        calibration: CalibrationState,
        dtype: torch.dtype,
    ) -> PrepareResult:
        """Search the α with the smallest layer error, and the sites that keep float inputs."""
        before = {
            site: self._unsmoothed_output_error(block, site, statistics[site])
            for site in block.sites
        }
        trial = activation_smoothing.SmoothingTrial(
            block, statistics, calibration, dtype, self._quantize_layer
        )
        if self.alpha is None:
            alphas, error, plain = activation_smoothing.search_smoothing_alphas(trial)
        else:
            alphas = dict.fromkeys(block.sites, self.alpha)
            error, plain = (
                trial.measure_output_error(alphas),
                trial.measure_output_error(dict.fromkeys(block.sites)),
            )
        floats: frozenset[str] = frozenset()
        while (
            self.max_layer_error is not None
            and error > self.max_layer_error
            and len(floats) < len(block.sites)
        ):
            tried = {}
            for site in block.sites:
                if site not in floats:
                    trial.round_layer = partial(
                        self._quantize_layer, weight_only_sites=floats | {site}
                    )
                    tried[site] = trial.measure_output_error(alphas)
            best = min(tried, key=lambda site: tried[site])
            floats, error = floats | {best}, tried[best]
        done = activation_smoothing.smoothing_result(
            block, activation_smoothing.apply_smoothing(block, statistics, alphas, dtype), alphas
        )
        for site in block.sites:
            done.facts[site] |= before[site] | {
                "layer_error": round_to_3_significant_digits(error),
                "layer_error_unsmoothed": round_to_3_significant_digits(plain),
            }
            done.facts[site] |= {"activations": 16 if site in floats else 8}
        done.quantize_by_site.update(dict.fromkeys(floats, self.quantize_weight_only))
        return done

    def quantize(self, weight: torch.Tensor, statistics: InputStatistics | None) -> W8A8Weight:
        """Round to nearest; a static input scale is the one with the smallest output error."""
        quantized = W8A8Weight.pack(weight, torch.float32, per_channel=self.per_channel)
        return (
            search_static_input_scale(weight, quantized, statistics)
            if self.static_input_scale and statistics is not None
            else quantized
        )

    def quantize_weight_only(
        self,
        weight: torch.Tensor,
        statistics: InputStatistics | None,  # noqa: ARG002
    ) -> W8A8Weight:
        """Quantize the weight for float inputs."""
        return W8A8Weight.pack(
            weight, torch.float32, per_channel=self.per_channel, input_scale=FLOAT_INPUT_MARKER
        )

    def _quantize_layer(
        self,
        block: QuantizableLayer,
        calibration: CalibrationState,
        weight_only_sites: frozenset[str] = frozenset(),
    ) -> None:
        """Quantize each matrix of a layer when its input is computed."""
        for site in block.sites:
            calibration.forward_to_site(block, site)
            statistics = (
                collect_input_statistics(calibration.site_inputs(), site, needs_hessian=False)
                if self.static_input_scale
                else None
            )
            quantize = self.quantize_weight_only if site in weight_only_sites else self.quantize
            for linear in block.site_linears(site).values():
                linear.weight = quantize(linear.weight.dequantize(), statistics)
        calibration.forward_to_layer_end(block)

    def _unsmoothed_output_error(
        self, block: QuantizableLayer, site: str, statistics: InputStatistics
    ) -> dict[str, float]:
        """Return the error of a site's outputs without smoothing."""
        weight = block.stacked_site_weight(site)
        return {
            "before": weight_output_error(weight, self.quantize(weight, statistics), statistics)
        }


def search_static_input_scale(
    weight: torch.Tensor, quantized: Any, statistics: InputStatistics
) -> Any:
    """Return ``quantized`` with one static input scale.

    The scale is the fraction of the largest one that has the smallest output error.
    """
    rows = statistics.input_samples
    right = rows @ weight.T
    peak = float(statistics.max_abs.max().clamp(min=1e-6))
    best, least = quantized, float("inf")
    most = (
        torch.iinfo(torch.int8).max
        if quantized.VALUE_DTYPE is torch.int8
        else torch.finfo(quantized.VALUE_DTYPE).max
    )
    for shrink in CLIP_FACTORS:
        scale = torch.full((1,), peak * shrink / most, device=weight.device)
        tried = type(quantized).from_values_and_scales(quantized.weight, quantized.scale, scale)
        error = float(
            (tried.fake_quantize_input(rows) @ tried.dequantize().T - right).square().sum()
        )
        if error < least:
            best, least = tried, error
    return best


RECIPE = SmoothQuantRecipe
