"""Chooses the device of the reference: the engine's GPU if it has room and true float32.

A wide model's reference takes minutes on a CPU and seconds on a GPU. The computation is the same:
torch's own operations in float32, no kernels of modelmill, TF32 off. Whether they keep float32
precision on the GPU (a driver's setting may change it) is measured: the first layer is computed on
both devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from modelmill.accept.error_metrics import compare_tensors
from modelmill.accept.reference import LayerTrace, ReferenceModel, open_reference
from modelmill.checkpoint.open import Checkpoint
from modelmill.nn.linear import Linear

MAX_CPU_GPU_REL_L2 = 2e-5
"""Largest rel_l2 between GPU and CPU, of each module's output: 3e-6 in float32, 3e-4 with TF32."""
GPU_HEADROOM_BYTES = 3 << 30  # bytes: float64 copies, logits, allocator overhead
GPU_BYTES_PER_LAYER_WEIGHT = (
    # bytes per weight of a layer: the checkpoint's and the engine's in float32, and intermediates
    16
)


class PlacedReference(NamedTuple):
    """The reference and its device, for the report."""

    reference: ReferenceModel
    description: str
    device: str = "cpu"


def open_cpu_reference(checkpoint: Checkpoint, reason: str) -> PlacedReference:
    """Return the reference on the CPU after a failure on the GPU."""
    return PlacedReference(open_reference(checkpoint), f"float32 on the CPU: {reason}")


def place_reference(
    checkpoint: Checkpoint, engine_core: Any, ids: Sequence[int]
) -> PlacedReference:
    """Place the reference of an engine's checkpoint on a device.

    ids: a sequence for the test of the device.
    """
    here = open_reference(checkpoint)
    if torch.device(engine_core.device).type != "cuda":
        return PlacedReference(here, "float32 on the CPU")
    needed, free = (
        GPU_HEADROOM_BYTES
        + GPU_BYTES_PER_LAYER_WEIGHT * _largest_layer_weight_count(engine_core.model_runner.model),
        torch.cuda.mem_get_info(engine_core.device)[0],
    )
    if free < needed:
        return PlacedReference(
            here,
            f"float32 on the CPU: on the GPU {needed >> 20} MiB would be needed, {free >> 20} are "
            "free",
        )
    there = open_reference(checkpoint, device=engine_core.device)
    off = max_first_layer_device_rel_l2(here, there, ids)
    if not off <= MAX_CPU_GPU_REL_L2:
        return PlacedReference(
            here, f"float32 on the CPU: the GPU's float32 is off by {off:.1g} (is TF32 forced?)"
        )
    description = (
        f"float32 on {torch.cuda.get_device_name(engine_core.device)}, TF32 off; off "
        f"the CPU's by {off:.1g}"
    )
    return PlacedReference(there, description, str(engine_core.device))


def max_first_layer_device_rel_l2(
    one: ReferenceModel, other: ReferenceModel, ids: Sequence[int]
) -> float:
    """Return the largest rel_l2 between two devices' outputs of the first layer's modules."""
    traces: list[LayerTrace] = []
    for reference in (one, other):
        x = reference.embed(torch.tensor(list(ids)))
        traces.append(reference.run_layer(0, reference.layer_weights(0), x, len(ids)))
    right, ours = traces
    return max(
        compare_tensors(name, ours[name].output, right[name].output).rel_l2 for name in right
    )


def _largest_layer_weight_count(model: Any) -> int:
    """Return the number of weights of the largest layer."""
    counts = [
        sum(m.weight.shape[0] * m.weight.shape[1] for m in layer.modules() if isinstance(m, Linear))
        for layer in model.layers
    ]
    return max(counts, default=0)
