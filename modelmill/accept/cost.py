"""What rounding did to each matrix of an engine that no calibration told of: seen on the acceptance text.

A calibrated recipe keeps these facts with the engine (artifact/quantization.py); int8, and int4 and fp8 rounded to
nearest, see no inputs while they are built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from modelmill.accept.own import LINEARS
from modelmill.accept.reference import LayerTrace, LayerWeights
from modelmill.accept.stages import short

OUTLIERS = 4


def layer_cost(
    index: int, weights: LayerWeights, held: LayerWeights, trace: LayerTrace, model: Any, kinds: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """layer, module, before and after (shares of the outputs), bits and outliers of a layer's quantized matrices.

    weights, trace: the checkpoint's, and what they made of some tokens. held: what the engine holds (accept.own).
    before and after are the same: what is held is what rounding to nearest gives. outliers: (input channel, how many
    times the median one).
    """
    for path, (names, _) in LINEARS.items():
        if names[0] not in weights or kinds.get(f"layers.{index}.{path}", "dense") == "dense":
            continue
        if any(held[name].weight.shape != weights[name].weight.shape for name in names):
            continue  # refused, and nothing to tell
        stored = model.layers[index].get_submodule(path).held.tensors().values()
        bits = 8 * sum(t.numel() * t.element_size() for t in stored) / sum(weights[n].weight.numel() for n in names)
        yield {"layer": index, "module": path, **_facts(names, weights, held, trace), "bits": round(bits, 3)}


def _facts(names: tuple[str, ...], weights: LayerWeights, held: LayerWeights, trace: LayerTrace) -> dict[str, Any]:
    """What the matrices of one input do to it."""
    (given,) = trace[names[0]].inputs[:1]
    seen = held[names[0]].seen
    rounded = given if seen is None else seen(given)
    found = torch.cat([rounded.float() @ held[name].weight.T for name in names], 1)
    expected = torch.cat([_product(trace[name].output, weights[name].bias) for name in names], 1)
    error = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
    peak = given.abs().amax(0)
    median = float(peak.median().clamp(min=1e-30))
    channels = peak.argsort(descending=True)[:OUTLIERS].tolist()
    outliers = [[channel, short(float(peak[channel]) / median, 3)] for channel in channels]
    return {"before": short(error, 3), "after": short(error, 3), "outliers": outliers}


def _product(output: Tensor, bias: Tensor | None) -> Tensor:
    """An output without its bias."""
    return output if bias is None else output - bias
