"""Measures how much a model's logits amplify rounding, on the reference alone.

The published bound of the logits holds for models that pass rounding on as it is. Some amplify it:
a norm over few values whose sum nearly cancels, a recurrent state that is read long after it was
written. How much is a property of the checkpoint, so that the reference can tell it: it runs a
second time with weights that carry random noise as large as the honest rounding of a product, and
its logits move as those of an honest engine do. In plain models (seeded Gaussian and Student-t(3)
weights, 2-32 layers, widths 64-256) they move by 0.74-1.02 times noise · √(layers + 2), the law of
the published bound; what exceeds 1 is amplification, and the bound grows by that factor.

Experts: near a tie noise decides between two of them, so both runs take the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from modelmill.accept.error_metrics import compare_logits
from modelmill.accept.reference import LayerWeights, ModuleWeights, ReferenceModel
from modelmill.accept.reference_trace import ROUTING_MODULE, ReferenceSequence

NOISE_TO_BOUND_RATIO = 1 / 3
"""The bounds are three times the worst honest rounding (accept/tolerances.py)."""


class PlainAndNoisyReferenceRun(NamedTuple):
    """The reference's final residual streams [T, H], its choice of experts, and its amplification.

    Attributes:
        streams: of each sequence.
        noisy_streams: those with noise in the weights.
        routings: by layer, the weights [T, E] of each sequence.
        amplification: of rounding, in the logits; at least 1.
    """

    streams: list[Tensor]
    noisy_streams: list[Tensor]
    routings: dict[int, list[Tensor]]
    amplification: float


@dataclass
class _PlainAndNoisySequence:
    """A sequence with and without noise in the weights; both choose the same experts."""

    plain: ReferenceSequence
    noisy: ReferenceSequence
    routing: Tensor | None = None

    @staticmethod
    def from_ids(
        reference: ReferenceModel, ids: Sequence[int], prompt_length: int
    ) -> _PlainAndNoisySequence:
        """Embed a sequence twice."""
        return _PlainAndNoisySequence(
            ReferenceSequence.from_ids(reference, ids, prompt_length),
            ReferenceSequence.from_ids(reference, ids, prompt_length),
        )

    def run_layer(self, index: int, weights: LayerWeights, noisy_weights: LayerWeights) -> None:
        """Run a layer with both weights."""
        trace = self.plain.run_layer(index, weights)
        self.routing = trace[ROUTING_MODULE].output if ROUTING_MODULE in trace else None
        if self.routing is not None:
            noisy_weights = noisy_weights | {ROUTING_MODULE: ModuleWeights(self.routing)}
        self.noisy.run_layer(index, noisy_weights)


@torch.no_grad()
def measure_rounding_amplification(
    reference: ReferenceModel, sequences: Sequence[tuple[Sequence[int], int]], bound: float
) -> PlainAndNoisyReferenceRun:
    """Run sequences (ids, length of the prompt) with and without noise in the weights.

    Args:
        reference: the reference; one layer is in memory at a time.
        sequences: what it runs.
        bound: rel_l2 of the logits as published, which decides how large the noise is.
    """
    depth = math.sqrt(reference.num_layers + 2)
    noise = NOISE_TO_BOUND_RATIO * bound / depth
    generator = torch.Generator().manual_seed(23)
    pairs = [_PlainAndNoisySequence.from_ids(reference, *each) for each in sequences]
    routings: dict[int, list[Tensor]] = {}
    for index in range(reference.num_layers):
        weights = reference.layer_weights(index)
        noisy_weights = _add_weight_noise(weights, noise, generator)
        for pair in pairs:
            pair.run_layer(index, weights, noisy_weights)
            if pair.routing is not None:
                routings.setdefault(index, []).append(pair.routing)
    streams, noisy = (
        [pair.plain.stream for pair in pairs],
        [pair.noisy.stream for pair in pairs],
    )
    exact, moved = (reference.head(torch.cat(each))["logits"].output for each in (streams, noisy))
    growth = compare_logits("logits", moved, exact).rel_l2 / (noise * depth)
    return PlainAndNoisyReferenceRun(streams, noisy, routings, max(1.0, growth))


def _add_weight_noise(
    weights: LayerWeights, noise: float, generator: torch.Generator
) -> LayerWeights:
    """Return a layer's weights, each matrix with relative noise in every element."""
    return {
        name: affine._replace(weight=_perturb_weight(affine.weight, noise, generator))
        if affine.weight.dim() > 1
        else affine
        for name, affine in weights.items()
    }


def _perturb_weight(weight: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    factors = torch.randn(weight.shape, generator=generator) * noise + 1
    return weight * factors.to(weight)
