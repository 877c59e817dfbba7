"""W8A8 with smoothed activations (quant/smooth.py): int8 weights, int8 inputs scaled by token or by calibration.

A layer whose output errs by more than the limit with the best smoothers keeps the inputs of some of its matrices as
they are, the fewest that bring it under the limit; their weights are int8 all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from modelmill.core.config import BuildConfig
from modelmill.quant import smooth
from modelmill.quant.block import SITES, Block, Flow
from modelmill.quant.calibrate import collect, output_error, short
from modelmill.quant.recipe import Prepared, Statistics
from modelmill.weights.w8a8 import AS_THEY_ARE, Held

SHRINKS = (1.0, 0.85, 0.7, 0.5, 0.3)
Hold = Callable[[torch.Tensor, Statistics | None], Held]


class Recipe:
    """Options of BuildConfig: alpha, activation_scales, weight_scales, max_layer_error."""

    kind = "w8a8"
    calibrated = prepares = searches = True
    moments = False

    def __init__(self, config: BuildConfig) -> None:
        self.alpha = None if config.alpha == "auto" else float(config.alpha)
        self.static, self.limit = config.activation_scales == "tensor", config.max_layer_error
        self.per_channel = config.weight_scales == "channel"
        self.layout: Mapping[str, Any] = {"per_channel": self.per_channel}

    def prepare(self, block: Block, statistics: Mapping[str, Statistics], dtype: torch.dtype) -> Prepared:
        """One α for all sites, nothing tried."""
        alphas: smooth.Alphas = dict.fromkeys(SITES, 0.5 if self.alpha is None else self.alpha)
        return smooth.prepared(block, smooth.apply(block, statistics, alphas, dtype), alphas)

    def search(self, block: Block, statistics: Mapping[str, Statistics], flow: Flow, dtype: torch.dtype) -> Prepared:
        """The α that err least on the layer's output, and the sites whose inputs stay as they are."""
        before = {site: self._before(block, site, statistics[site]) for site in SITES}
        trial = smooth.Trial(block, statistics, flow, dtype, self._round)
        if self.alpha is None:
            alphas, error, plain = smooth.search(trial)
        else:
            alphas = dict.fromkeys(SITES, self.alpha)
            error, plain = trial.error(alphas), trial.error(dict.fromkeys(SITES))
        floats: frozenset[str] = frozenset()
        while self.limit is not None and error > self.limit and len(floats) < len(SITES):
            tried = {}
            for site in SITES:
                if site not in floats:
                    trial.round = partial(self._round, floats=floats | {site})
                    tried[site] = trial.error(alphas)
            best = min(tried, key=lambda site: tried[site])
            floats, error = floats | {best}, tried[best]
        done = smooth.prepared(block, smooth.apply(block, statistics, alphas, dtype), alphas)
        for site in SITES:
            done.facts[site] |= before[site] | {"layer_error": short(error), "layer_error_unsmoothed": short(plain)}
            done.facts[site] |= {"activations": 16 if site in floats else 8}
        done.hold.update(dict.fromkeys(floats, self.hold_floats))
        return done

    def hold(self, weight: torch.Tensor, statistics: Statistics | None) -> Held:
        """Rounded to nearest; the static scale of the inputs is what errs least on the outputs."""
        held = Held.pack(weight, torch.float32, per_channel=self.per_channel)
        return static(weight, held, statistics) if self.static and statistics is not None else held

    def hold_floats(self, weight: torch.Tensor, statistics: Statistics | None) -> Held:  # noqa: ARG002
        """The same weights for inputs as they are."""
        return Held.pack(weight, torch.float32, per_channel=self.per_channel, input_scale=AS_THEY_ARE)

    def _round(self, block: Block, flow: Flow, floats: frozenset[str] = frozenset()) -> None:
        """Through a layer, each matrix rounded when its input is there."""
        for site in SITES:
            flow.reach(block, site)
            linear = block.linear(site)
            seen = collect(flow.given(), site, moments=False) if self.static else None
            linear.held = (self.hold_floats if site in floats else self.hold)(linear.held.dense(), seen)
        flow.leave(block)

    def _before(self, block: Block, site: str, statistics: Statistics) -> dict[str, float]:
        """The error of a site's outputs without smoothing."""
        weight = block.linear(site).held.dense()
        return {"before": output_error(weight, self.hold(weight, statistics), statistics)}


def static(weight: torch.Tensor, held: Any, statistics: Statistics) -> Any:
    """``held`` with one scale for all inputs: of the shares of the largest one the one whose outputs err least."""
    rows = statistics.rows
    right = rows @ weight.T
    peak = float(statistics.max_abs.max().clamp(min=1e-6))
    best, least = held, float("inf")
    most = torch.iinfo(torch.int8).max if held.VALUES is torch.int8 else torch.finfo(held.VALUES).max
    for shrink in SHRINKS:
        scale = torch.full((1,), peak * shrink / most, device=weight.device)
        tried = type(held).of(held.weight, held.scale, scale)
        error = float((tried.seen(rows) @ tried.dense().T - right).square().sum())
        if error < least:
            best, least = tried, error
    return best
