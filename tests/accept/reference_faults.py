"""Planted faults: an otherwise honest engine that reads its checkpoint wrongly in one way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from modelmill.accept.error_metrics import ErrorMetrics, compare_tensors
from modelmill.accept.reference import LayerWeights, ModuleWeights, ReferenceModel
from modelmill.accept.reference.decoder import DecoderReference
from tests.accept.faultless_modules import FaultlessModules

# Fault → the modules whose module-local error must leave its bounds.
FAULTS: dict[str, tuple[str, ...]] = {
    "o_proj x 1.05": ("o_proj",),
    "gate and up swapped": ("gate", "up"),
    "o_proj transposed": ("o_proj",),
    "q transposed": ("q",),
    "k named v": ("k", "v"),
    "norms swapped": ("input_norm", "mlp_norm"),
    "next layer's down": ("down",),
    "rope base": ("q_rot", "k_rot"),
    "eps": ("input_norm", "mlp_norm"),
}


def wrong_weights(fault: str, weights: LayerWeights, following: LayerWeights) -> LayerWeights:
    """The layer's weights as the fault leaves them."""
    wrong = dict(weights)
    if fault == "o_proj x 1.05":
        wrong["o_proj"] = ModuleWeights(weights["o_proj"].weight * 1.05, weights["o_proj"].bias)
    elif fault.endswith("transposed"):
        name = fault.split()[0]
        wrong[name] = ModuleWeights(weights[name].weight.T.contiguous(), weights[name].bias)
    elif fault == "next layer's down":
        wrong["down"] = following["down"]
    elif fault in ("gate and up swapped", "k named v", "norms swapped"):
        one, other = FAULTS[fault]
        wrong[one], wrong[other] = weights[other], weights[one]
    return wrong


def norm_probe(reference: ReferenceModel, index: int, name: str) -> Tensor:
    """A tiny input of the size of √eps, on which the epsilon is half of the norm."""
    draw = torch.Generator().manual_seed(index)
    shape = (8, reference.hidden_size)
    return torch.randn(*shape, generator=draw) * reference.norm_eps(index, name) ** 0.5


def fault_rows(
    reference: ReferenceModel, fault: str, ids: Tensor, dtype: torch.dtype, recipe: str
) -> Iterator[ErrorMetrics]:
    """Module-local errors of the faulty modules, layer by layer."""
    assert isinstance(reference, DecoderReference)
    faultless = FaultlessModules(reference, dtype, recipe)
    x = reference.embed(ids)
    right_rope, right_eps = reference.rope, reference.eps
    for index in range(min(reference.num_layers, 30)):
        weights = reference.layer_weights(index)
        following = reference.layer_weights((index + 1) % reference.num_layers)
        trace = reference.run_layer(index, weights, x, len(ids))
        wrong = wrong_weights(fault, weights, following)
        for name in FAULTS[fault]:
            inputs, output, _ = trace[name]
            if fault == "eps":
                inputs = (norm_probe(reference, index, name),)
                output = reference.run_norm(index, name, inputs[0])
            try:
                if fault == "rope base":
                    reference.rope = replace(right_rope, theta=10000.0)
                if fault == "eps":
                    reference.eps = right_eps / 10
                actual = faultless.module(index, wrong, name, inputs)
            finally:
                reference.rope, reference.eps = right_rope, right_eps
            yield compare_tensors(f"layer {index} {name}", actual, output)
        x = trace["output"].output
