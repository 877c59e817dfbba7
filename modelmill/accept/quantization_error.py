"""Measures the quantization error of engines without calibration, on the acceptance text.

A calibrated recipe stores these facts with the engine (artifact/store.py); int8, and
int4 and fp8 rounded to nearest, have no inputs during the build.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference import LayerTrace, LayerWeights
from modelmill.accept.vision_stage_check import round_significant_digits
from modelmill.nn.layer_spec import layer_spec

NUM_OUTLIER_CHANNELS = 4


def layer_matrix_quantization_errors(
    index: int,
    checkpoint_weights: LayerWeights,
    engine_weights: LayerWeights,
    trace: LayerTrace,
    model: Any,
    weight_formats: Mapping[str, str],
) -> Iterator[dict[str, Any]]:
    """Return layer, module, errors, bits and outliers of a layer's quantized matrices.

    before and after are equal, since the stored weights are rounded to nearest; both are relative
    to the outputs. outliers: (input channel, ratio to the median channel).

    Args:
        index: the layer.
        checkpoint_weights: the checkpoint's.
        engine_weights: the engine's (accept.quantized_reference).
        trace: the checkpoint's activations of some tokens.
        model: the engine's model.
        weight_formats: weight format by module path.
    """
    layer = model.layers[index]
    for linear in layer_spec(layer).linears:
        path, names = linear.path, linear.reference
        if weight_formats.get(f"layers.{index}.{path}", "dense") == "dense":
            continue
        if any(
            engine_weights[name].weight.shape != checkpoint_weights[name].weight.shape
            for name in names
        ):
            continue  # refused anyway
        stored = layer.get_submodule(path).weight.tensors().values()
        bits = (
            8
            * sum(t.numel() * t.element_size() for t in stored)
            / sum(checkpoint_weights[n].weight.numel() for n in names)
        )
        yield {
            "layer": index,
            "module": path,
            **_output_error_and_outlier_channels(names, checkpoint_weights, engine_weights, trace),
            "bits": round(bits, 3),
        }


def _output_error_and_outlier_channels(
    names: tuple[str, ...],
    checkpoint_weights: LayerWeights,
    engine_weights: LayerWeights,
    trace: LayerTrace,
) -> dict[str, Any]:
    """Return the error and outliers of the matrices that share an input."""
    (x,) = trace[names[0]].inputs[:1]
    fake_quantize = engine_weights[names[0]].fake_quantize
    rounded = x if fake_quantize is None else fake_quantize(x)
    outputs = torch.cat([rounded.float() @ engine_weights[name].weight.T for name in names], 1)
    expected = torch.cat(
        [_subtract_bias(trace[name].output, checkpoint_weights[name].bias) for name in names], 1
    )
    error = float((outputs - expected).norm() / expected.norm().clamp(min=1e-30))
    peak = x.abs().amax(0)
    median = float(peak.median().clamp(min=1e-30))
    channels = peak.argsort(descending=True)[:NUM_OUTLIER_CHANNELS].tolist()
    outliers = [
        [channel, round_significant_digits(float(peak[channel]) / median, 3)]
        for channel in channels
    ]
    return {
        "before": round_significant_digits(error, 3),
        "after": round_significant_digits(error, 3),
        "outliers": outliers,
    }


def _subtract_bias(output: Tensor, bias: Tensor | None) -> Tensor:
    """Return an output without its bias."""
    return output if bias is None else output - bias
