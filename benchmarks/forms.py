"""Ways to hold a matrix that was drawn at random, rounded to nearest: what ``-q`` of the benchmarks names.

Steps and zero-points of activations are drawn too, of the size that calibration would give them: how fast a kernel is
does not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from modelmill.weights import clustered, held, int8_group
from modelmill.weights.held import HeldWeight

Layout = Mapping[str, Any]
Form = Callable[[torch.Tensor, torch.dtype], HeldWeight]

# name → kind of weight, its layout
FORMS: dict[str, tuple[str, Layout]] = {
    "dense": ("dense", {}),
    "int8": ("int8", {}),
    "int8-g32": ("int8_group", {"group": 32}),
    "int8-g128": ("int8_group", {"group": 128}),
    "int4": ("int4", {"group": 128}),
    "int4-g64": ("int4", {"group": 64}),
    "int4-g32": ("int4", {"group": 32}),
    "int4-symmetric": ("int4", {"group": 128, "symmetric": True}),
    "smoothquant": ("w8a8", {}),
    "smoothquant-static": ("w8a8", {"input_scale": 1 / 32}),
    "fp8": ("fp8", {}),
    "fp8-static": ("fp8", {"input_scale": 1 / 128}),
    "rptq-w8a8": ("clustered", {"weight_bits": 8, "bits": 8}),
    "rptq-w4a8": ("clustered", {"weight_bits": 4, "bits": 8}),
    "rptq-w4a4": ("clustered", {"weight_bits": 4, "bits": 4}),
    "rptq-w8a8-folded": ("clustered", {"weight_bits": 8, "bits": 8, "mode": "folded"}),
    "rptq-w8a8-dynamic": ("clustered", {"weight_bits": 8, "bits": 8}),
    "rptq-w4a8-dynamic": ("clustered", {"weight_bits": 4, "bits": 8}),
}


def form(name: str) -> Form:
    """(weight [N, K], dtype of the activations) → the held weight. Raises KeyError for an unknown name."""
    kind, layout = FORMS[name]
    if kind == "int8_group":
        return lambda weight, _: in_groups(weight, **layout)
    static = kind == "clustered" and not name.endswith("dynamic")

    def hold(weight: torch.Tensor, dtype: torch.dtype) -> HeldWeight:
        packed = held.pack(kind, weight, dtype, **layout)
        return calibrated(packed) if static and isinstance(packed, clustered.Held) else packed

    return hold


def in_groups(weight: torch.Tensor, group: int) -> HeldWeight:
    """8 bits with a scale for each group of columns, as checkpoints bring them (``modelmill build -q`` has no such)."""
    parts = weight.float().unflatten(1, (-1, group))
    scale = (parts.abs().amax(-1) / 127).half()
    codes = torch.round(parts / scale.float()[..., None]).clamp(-127, 127).to(torch.int8)
    return int8_group.Held.from_codes(codes.flatten(1), scale, None, group)


def calibrated(weight: clustered.Held) -> clustered.Held:
    """With a static step and zero-point for each cluster."""
    columns, groups = weight.order.numel(), weight.scale.shape[1]
    device = weight.order.device
    generator = torch.Generator(device).manual_seed(columns)
    step = (torch.rand(groups, generator=generator, device=device) + 0.5) * (8 / 2**weight.bits)
    zero = torch.randint(
        -(2 ** (weight.bits - 3)), 2 ** (weight.bits - 3), (groups,), generator=generator, device=device
    )
    each = columns // groups
    return weight.static((1 / step).repeat_interleave(each), zero.repeat_interleave(each), step)
