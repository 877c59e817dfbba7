"""fp8 (e4m3) weights, their errors carried on as GPTQ does; activations in fp8 by token or with one static scale.

The steps of e4m3 are a sixteenth of a number's binade, so a row's scale decides on nothing but where in its binade each
weight lies: eight scales an eighth of a binade apart are tried, and what errs least on the inputs' energy is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from modelmill.core.config import BuildConfig
from modelmill.core.errors import UsageError
from modelmill.ops.eight_bit import rounded
from modelmill.quant.block import Block
from modelmill.quant.gptq import carried, chosen_anew, damped
from modelmill.quant.recipe import Prepared, Statistics
from modelmill.quant.smoothquant import static
from modelmill.quant.steps import E4M3, Steps
from modelmill.weights.fp8 import Held
from modelmill.weights.w8a8 import AS_THEY_ARE, BY_TOKEN

METHODS = ("gptq", "nearest")
BINADE = 8  # scales tried
SWEEPS = 2


class Recipe:
    """Options of BuildConfig: method (gptq, nearest), activation_scales, weight_scales."""

    kind = "fp8"
    prepares = False

    def __init__(self, config: BuildConfig) -> None:
        self.method = METHODS[0] if config.method == "auto" else config.method
        if self.method not in METHODS:
            raise UsageError(f"-q fp8 --method {self.method}: it is one of {', '.join(METHODS)}")
        self.moments = self.method == "gptq"
        self.given = config.activation_scales == "tensor"
        self.calibrated = self.given or self.moments
        self.per_channel = config.weight_scales == "channel"
        given = AS_THEY_ARE if config.activation_scales == "none" else BY_TOKEN
        self.layout: Mapping[str, Any] = {"per_channel": self.per_channel, "input_scale": given}

    def prepare(self, block: Block, statistics: Mapping[str, Statistics], dtype: torch.dtype) -> Prepared:  # noqa: ARG002
        """Nothing."""
        return Prepared()

    def hold(self, weight: torch.Tensor, statistics: Statistics | None) -> Held:
        """[N, K] float32 → fp8; a static scale is what errs least on the outputs. No statistics: nearest."""
        held = Held.pack(weight, torch.float32, **self.layout)
        if statistics is None:
            return held
        if self.moments:
            values, scale = carried_to_e4m3(weight, damped(statistics.hessian), held.scale, self.per_channel)
            held = Held.of(values, scale, held.input_scale)
        return static(weight, held, statistics) if self.given else held


def carried_to_e4m3(
    weight: torch.Tensor, hessian: torch.Tensor, scale: torch.Tensor, per_channel: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values [N, K] e4m3, scale [N]). scale: the least that holds each row; hessian: [K, K], damped."""
    scale = scale_in_binade(weight, hessian.diagonal(), scale, per_channel)
    steps = Steps(scale[:, None].expand_as(weight).contiguous())
    values = carried(weight, hessian, steps)
    for _ in range(SWEEPS):
        values = chosen_anew(weight, hessian, values, steps)
    return rounded(values / scale[:, None], E4M3), scale


def scale_in_binade(weight: torch.Tensor, mass: torch.Tensor, scale: torch.Tensor, per_channel: bool) -> torch.Tensor:
    """[N]: ``scale`` times 2^(i / 8), the i < 8 of each row, or of all, whose rounding errs least; mass: [K]."""
    best = torch.full_like(scale, torch.inf)
    found = scale
    for i in range(BINADE):
        tried = scale * 2.0 ** (i / BINADE)
        off = rounded(weight / tried[:, None], E4M3).float() * tried[:, None] - weight
        error = (off.square() * mass).sum(-1)
        error = error if per_channel else error.sum().expand_as(error)
        found, best = torch.where(error < best, tried, found), torch.minimum(error, best)
    return found
