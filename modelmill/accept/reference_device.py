"""Where the reference computes: on the engine's GPU where there is room and its float32 is as good
as the CPU's.

A wide model's reference takes minutes on a CPU beside a GPU that would take seconds. It stays what
it is: torch's own operations in float32, none of our kernels, TF32 off. Whether they really keep
float32 there (a driver's setting may
say otherwise) is not believed but measured: the first layer is computed in both places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from modelmill.accept.metrics import compare_tensors
from modelmill.accept.reference import LayerTrace, ReferenceModel, open_reference
from modelmill.checkpoint.open import Checkpoint
from modelmill.nn.linear import Linear

MAX_REL_L2 = 2e-5
"""rel_l2 between float32 here and there, of each module's output: 3e-6 where both are right, 3e-4
with TF32.
"""
SPARE_BYTES = 3 << 30  # bytes: pieces in float64, logits, what the allocator keeps
BYTES_PER_WEIGHT = (
    # bytes of a layer's weight: the checkpoint's and the engine's in float32, and what is made of
    # both
    16
)


class PlacedReference(NamedTuple):
    """The reference, and where it computes: for the report."""

    reference: ReferenceModel
    description: str
    device: str = "cpu"


def cpu_reference(checkpoint: Checkpoint, reason: str) -> PlacedReference:
    """Where a GPU was tried and failed."""
    return PlacedReference(open_reference(checkpoint), f"float32 on the CPU: {reason}")


def place_reference(
    checkpoint: Checkpoint, engine_core: Any, ids: Sequence[int]
) -> PlacedReference:
    """The reference of an engine's checkpoint. ids: of a sequence that it is tried on."""
    here = open_reference(checkpoint)
    if torch.device(engine_core.device).type != "cuda":
        return PlacedReference(here, "float32 on the CPU")
    needed, free = (
        SPARE_BYTES + BYTES_PER_WEIGHT * _largest_layer_weights(engine_core.model_runner.model),
        torch.cuda.mem_get_info(engine_core.device)[0],
    )
    if free < needed:
        return PlacedReference(
            here,
            f"float32 on the CPU: on the GPU {needed >> 20} MiB would be needed, {free >> 20} are "
            "free",
        )
    there = open_reference(checkpoint, device=engine_core.device)
    off = max_disagreement(here, there, ids)
    if not off <= MAX_REL_L2:
        return PlacedReference(
            here, f"float32 on the CPU: the GPU's float32 is off by {off:.1g} (is TF32 forced?)"
        )
    description = (
        f"float32 on {torch.cuda.get_device_name(engine_core.device)}, TF32 off; off "
        f"the CPU's by {off:.1g}"
    )
    return PlacedReference(there, description, str(engine_core.device))


def max_disagreement(one: ReferenceModel, other: ReferenceModel, ids: Sequence[int]) -> float:
    """The largest rel_l2 between two places' outputs of a module of the first layer, all reading
    the same tokens.
    """
    traces: list[LayerTrace] = []
    for reference in (one, other):
        x = reference.embed(torch.tensor(list(ids)))
        traces.append(reference.run_layer(0, reference.layer_weights(0), x, len(ids)))
    right, ours = traces
    return max(
        compare_tensors(name, ours[name].output, right[name].output).rel_l2 for name in right
    )


def _largest_layer_weights(model: Any) -> int:
    """How many weights the largest layer has."""
    counts = [
        sum(m.weight.shape[0] * m.weight.shape[1] for m in layer.modules() if isinstance(m, Linear))
        for layer in model.layers
    ]
    return max(counts, default=0)
