"""What rounding did to each matrix of an engine that no calibration told of: seen on the acceptance
text.

A calibrated recipe keeps these facts with the engine (artifact/quantization_facts.py); int8, and
int4 and fp8 rounded to nearest, see no inputs while they are built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from modelmill.accept.quantized_reference import LINEAR_MODULES
from modelmill.accept.reference import LayerTrace, LayerWeights
from modelmill.accept.stage_check import round_digits

NUM_OUTLIERS = 4


def layer_quantization_error(
    index: int,
    checkpoint_weights: LayerWeights,
    engine_weights: LayerWeights,
    trace: LayerTrace,
    model: Any,
    weight_formats: Mapping[str, str],
) -> Iterator[dict[str, Any]]:
    """layer, module, before and after (shares of the outputs), bits and outliers of a layer's
    quantized matrices.

    checkpoint_weights, trace: the checkpoint's, and what they made of some tokens. engine_weights:
    what the engine holds (accept.quantized_reference).
    before and after are the same: what is held is what rounding to nearest gives. outliers: (input
    channel, how many times the median one).
    """
    for path, (names, _) in LINEAR_MODULES.items():
        if (
            names[0] not in checkpoint_weights
            or weight_formats.get(f"layers.{index}.{path}", "dense") == "dense"
        ):
            continue
        if any(
            engine_weights[name].weight.shape != checkpoint_weights[name].weight.shape
            for name in names
        ):
            continue  # refused, and nothing to tell
        stored = model.layers[index].get_submodule(path).weight.tensors().values()
        bits = (
            8
            * sum(t.numel() * t.element_size() for t in stored)
            / sum(checkpoint_weights[n].weight.numel() for n in names)
        )
        yield {
            "layer": index,
            "module": path,
            **_site_error(names, checkpoint_weights, engine_weights, trace),
            "bits": round(bits, 3),
        }


def _site_error(
    names: tuple[str, ...],
    checkpoint_weights: LayerWeights,
    engine_weights: LayerWeights,
    trace: LayerTrace,
) -> dict[str, Any]:
    """What the matrices of one input do to it."""
    (given,) = trace[names[0]].inputs[:1]
    fake_quantize = engine_weights[names[0]].fake_quantize
    rounded = given if fake_quantize is None else fake_quantize(given)
    found = torch.cat([rounded.float() @ engine_weights[name].weight.T for name in names], 1)
    expected = torch.cat(
        [_without_bias(trace[name].output, checkpoint_weights[name].bias) for name in names], 1
    )
    error = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
    peak = given.abs().amax(0)
    median = float(peak.median().clamp(min=1e-30))
    channels = peak.argsort(descending=True)[:NUM_OUTLIERS].tolist()
    outliers = [[channel, round_digits(float(peak[channel]) / median, 3)] for channel in channels]
    return {"before": round_digits(error, 3), "after": round_digits(error, 3), "outliers": outliers}


def _without_bias(output: Tensor, bias: Tensor | None) -> Tensor:
    """An output without its bias."""
    return output if bias is None else output - bias
