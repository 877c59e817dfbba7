"""fp8 (e4m3) weights rounded with GPTQ's error compensation, for fp8 inputs.

Inputs have per-token or one static scale. The steps of e4m3 are a sixteenth of a number's binade,
so a row's scale only decides where in its binade each weight lies: eight scales an eighth of a
binade apart are tried, and the one with the smallest error, weighted by the inputs' energy, is
kept.
"""

from __future__ import annotations

import torch

from modelmill.core.config import BuildConfig
from modelmill.core.errors import UsageError
from modelmill.core.recipe_declaration import (
    ActQuantTolerances,
    FormatTolerances,
    ImageTolerances,
    RecipeDeclaration,
)
from modelmill.ops.quant_types import round_to_dtype
from modelmill.quant.gptq import (
    E4M3_DTYPE,
    RoundingGrid,
    coordinate_descent_sweep,
    damp_hessian,
    round_with_error_compensation,
)
from modelmill.quant.recipe import InputStatistics, Recipe
from modelmill.quant.smoothquant import search_static_input_scale
from modelmill.weights.fp8 import Fp8Weight
from modelmill.weights.w8a8 import FLOAT_INPUT_MARKER, PER_TOKEN_SCALE_MARKER

# Read from the source, without importing this file: literals only (core/recipe_declaration.py).
DECLARATION = RecipeDeclaration(
    position=4,
    weight_format="fp8",
    docs=(
        "e4m3 / e4m3",
        "the same on a Hopper GPU; GPTQ's rounding by default, `--method nearest` needs no "
        "calibration",
    ),
    tolerances=FormatTolerances(
        weight=(0.1, 1.0, 1e-2),
        block=(0.6, 0.6, 0.07),
        act_quant=ActQuantTolerances(
            # tensor cores sum fp8 products with fewer bits than float32
            product={"float32": (4e-3, 1e-2), "float16": (2e-2, 5e-2), "bfloat16": (4e-2, 1.4e-1)},
            layer=(0.22, 0.4, 2e-2),
            logits=0.18,
        ),
        images=ImageTolerances(
            embedding=2e-1,
            mask_logits=5e-1,
            module={
                "float32": (1e-2, 5e-2, 3e-3),
                "float16": (5e-2, 1.5e-1, 3e-3),
                "bfloat16": (0.1, 0.2, 2e-2),
            },
        ),
    ),
    reads=("method", "activation_scales", "weight_scales"),
)

ROUNDING_METHODS = ("gptq", "nearest")
SCALES_PER_BINADE = 8  # scales tried
COORDINATE_DESCENT_SWEEPS = 2


class Fp8Recipe(Recipe):
    """Options of BuildConfig: method (gptq, nearest), activation_scales, weight_scales."""

    weight_format = "fp8"

    def __init__(self, config: BuildConfig) -> None:
        self.method = ROUNDING_METHODS[0] if config.method == "auto" else config.method
        if self.method not in ROUNDING_METHODS:
            raise UsageError(
                f"-q fp8 --method {self.method}: must be one of {', '.join(ROUNDING_METHODS)}"
            )
        self.needs_hessian = self.method == "gptq"
        self.static_input_scale = config.activation_scales == "tensor"
        self.needs_calibration = self.static_input_scale or self.needs_hessian
        self.per_channel = config.weight_scales == "channel"
        input_scale = (
            FLOAT_INPUT_MARKER if config.activation_scales == "none" else PER_TOKEN_SCALE_MARKER
        )
        self.pack_options = {
            "per_channel": self.per_channel,
            "input_scale": input_scale,
        }

    def quantize(self, weight: torch.Tensor, statistics: InputStatistics | None) -> Fp8Weight:
        """Quantize [N, K] float32 to fp8, with nearest rounding if there are no statistics.

        A static scale is the one with the smallest output error.
        """
        quantized = Fp8Weight.pack(weight, torch.float32, **self.pack_options)
        if statistics is None:
            return quantized
        if self.needs_hessian:
            values, scale = gptq_to_e4m3(
                weight, damp_hessian(statistics.hessian), quantized.scale, self.per_channel
            )
            quantized = Fp8Weight.from_values_and_scales(values, scale, quantized.input_scale)
        return (
            search_static_input_scale(weight, quantized, statistics)
            if self.static_input_scale
            else quantized
        )


def gptq_to_e4m3(
    weight: torch.Tensor, hessian: torch.Tensor, scale: torch.Tensor, per_channel: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values [N, K] e4m3 and scale [N].

    scale: the smallest scale that covers each row; hessian: [K, K], damped.
    """
    scale = search_scale_in_binade(weight, hessian.diagonal(), scale, per_channel)
    steps = RoundingGrid(scale[:, None].expand_as(weight).contiguous())
    values = round_with_error_compensation(weight, hessian, steps)
    for _ in range(COORDINATE_DESCENT_SWEEPS):
        values = coordinate_descent_sweep(weight, hessian, values, steps)
    return round_to_dtype(values / scale[:, None], E4M3_DTYPE), scale


def search_scale_in_binade(
    weight: torch.Tensor, importance: torch.Tensor, scale: torch.Tensor, per_channel: bool
) -> torch.Tensor:
    """Return ``scale`` [N] times 2^(i / 8) with the i < 8 of the smallest rounding error.

    importance: [K]. per_channel: choose i per row, otherwise one i for all.
    """
    best = torch.full_like(scale, torch.inf)
    best_scale = scale
    for i in range(SCALES_PER_BINADE):
        tried = scale * 2.0 ** (i / SCALES_PER_BINADE)
        off = round_to_dtype(weight / tried[:, None], E4M3_DTYPE).float() * tried[:, None] - weight
        error = (off.square() * importance).sum(-1)
        error = error if per_channel else error.sum().expand_as(error)
        best_scale, best = torch.where(error < best, tried, best_scale), torch.minimum(error, best)
    return best_scale


RECIPE = Fp8Recipe
