"""What rounding did to each matrix of an engine that no calibration told of: seen on the acceptance text.

A calibrated recipe keeps these facts with the engine (artifact/quantization.py); int8, and int4 and fp8 rounded to
nearest, see no inputs while they are built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from modelmill.accept.own import LINEARS
from modelmill.accept.reference import Reference
from modelmill.accept.stages import short

OUTLIERS = 4


def cost_rows(
    reference: Reference, model: Any, kinds: Mapping[str, str], ids: Sequence[int], length: int
) -> list[dict[str, Any]]:
    """layer, module, before and after (shares of the outputs), bits and outliers of every quantized matrix.

    reference: with the checkpoint's weights; it reads ``ids``, ``length`` of them at once. before and after are the
    same: what is held is what rounding to nearest gives. outliers: (input channel, how many times the median one).
    """
    stream = reference.embed(torch.tensor(list(ids)))
    found = []
    for index in range(reference.num_layers):
        weights = reference.layer_weights(index)
        trace = reference.run_layer(index, weights, stream, length)
        for path, (names, _) in LINEARS.items():
            if names[0] not in weights or kinds.get(f"layers.{index}.{path}", "dense") == "dense":
                continue
            held = model.layers[index].get_submodule(path).held.to("cpu")
            right = torch.cat([weights[name].weight for name in names])
            (given,) = trace[names[0]].inputs[:1]
            found.append({"layer": index, "module": path, **_facts(held, right, given)})
        stream = trace["output"].output
    return found


def _facts(held: Any, right: Tensor, given: Tensor) -> dict[str, Any]:
    """held: the engine's weight; right: the checkpoint's [N, K]; given: [T, K]."""
    given, right = given.float(), right.float()
    stored = sum(t.numel() * t.element_size() for t in held.tensors().values())
    seen = held.seen(given) if hasattr(held, "seen") else given
    expected = given @ right.T
    error = float((seen.float() @ held.dense().float().T - expected).norm() / expected.norm().clamp(min=1e-30))
    peak = given.abs().amax(0)
    median = float(peak.median().clamp(min=1e-30))
    channels = peak.argsort(descending=True)[:OUTLIERS].tolist()
    outliers = [[channel, short(float(peak[channel]) / median, 3)] for channel in channels]
    told = {"before": short(error, 3), "after": short(error, 3), "bits": round(8 * stored / right.numel(), 3)}
    return told | {"outliers": outliers}
