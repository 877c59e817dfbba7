"""Weight formats of random matrices, rounded to nearest: the values of the benchmarks' ``-q``.

Steps and zero-points of activations are drawn too, of the size that calibration would give them:
how fast a kernel is does not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from modelmill.ops.mxfp4_linear import BLOCK_COLUMNS
from modelmill.weights import base, int8_group, mxfp4, rptq
from modelmill.weights.base import WeightFormat

Layout = Mapping[str, Any]
WeightQuantizer = Callable[[torch.Tensor, torch.dtype], WeightFormat]

# name → kind of weight, its layout
WEIGHT_FORMATS: dict[str, tuple[str, Layout]] = {
    "dense": ("dense", {}),
    "int8": ("int8", {}),
    "int8-g32": ("int8_group", {"group": 32}),
    "int8-g128": ("int8_group", {"group": 128}),
    "int4": ("int4", {"group_size": 128}),
    "int4-g64": ("int4", {"group_size": 64}),
    "int4-g32": ("int4", {"group_size": 32}),
    "int4-symmetric": ("int4", {"group_size": 128, "symmetric": True}),
    "smoothquant": ("w8a8", {}),
    "smoothquant-static": ("w8a8", {"input_scale": 1 / 32}),
    "fp8": ("fp8", {}),
    "mxfp4": ("mxfp4", {}),
    "fp8-static": ("fp8", {"input_scale": 1 / 128}),
    "rptq-w8a8": ("rptq", {"weight_bits": 8, "bits": 8}),
    "rptq-w4a8": ("rptq", {"weight_bits": 4, "bits": 8}),
    "rptq-w4a4": ("rptq", {"weight_bits": 4, "bits": 4}),
    "rptq-w8a8-folded": ("rptq", {"weight_bits": 8, "bits": 8, "mode": "folded"}),
    "rptq-w8a8-dynamic": ("rptq", {"weight_bits": 8, "bits": 8}),
    "rptq-w4a8-dynamic": ("rptq", {"weight_bits": 4, "bits": 8}),
}


def weight_quantizer(name: str) -> WeightQuantizer:
    """(weight [N, K], dtype of the activations) → the held weight.

    Raises KeyError for an unknown name.
    """
    recipe, layout = WEIGHT_FORMATS[name]
    if recipe == "int8_group":
        return lambda weight, _: int8_group_weight(weight, **layout)
    if recipe == "mxfp4":
        return lambda weight, _: mxfp4_weight(weight)
    static = recipe == "rptq" and not name.endswith("dynamic")

    def hold(weight: torch.Tensor, dtype: torch.dtype) -> WeightFormat:
        packed = base.pack_as_format(recipe, weight, dtype, **layout)
        return (
            calibrated_rptq_weight(packed)
            if static and isinstance(packed, rptq.RptqWeight)
            else packed
        )

    return hold


def int8_group_weight(weight: torch.Tensor, group: int) -> WeightFormat:
    """Return int8 with a scale per group of columns, as in checkpoints (not a build recipe)."""
    parts = weight.float().unflatten(1, (-1, group))
    scale = (parts.abs().amax(-1) / 127).half()
    codes = torch.round(parts / scale.float()[..., None]).clamp(-127, 127).to(torch.int8)
    return int8_group.Int8GroupWeight.from_codes(codes.flatten(1), scale, None, group)


def mxfp4_weight(weight: torch.Tensor) -> WeightFormat:
    """Return MXFP4, as checkpoints store it (not a build recipe).

    The scales are those of OCP's Microscaling Formats 1.0, section 6.3.
    """
    columns = weight.shape[1]
    padded = F.pad(weight.float(), (0, -columns % BLOCK_COLUMNS))
    blocks = padded.unflatten(1, (-1, BLOCK_COLUMNS))
    # the largest value of a block comes into the binade of 4 and 6
    exponent = blocks.abs().amax(-1).clamp(min=2.0**-120).log2().floor() - 2
    values = blocks / exponent.exp2()[..., None]
    between = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=weight.device)
    codes = torch.bucketize(values.abs(), between) + 8 * (values < 0)
    scale = (exponent + 127).to(torch.uint8)
    codes = codes.to(torch.uint8).flatten(1)[:, :columns]
    return mxfp4.Mxfp4Weight.from_codes(codes, scale)


def calibrated_rptq_weight(weight: rptq.RptqWeight) -> rptq.RptqWeight:
    """With a static step and zero-point for each cluster."""
    columns, groups = weight.perm.numel(), weight.scale.shape[1]
    device = weight.perm.device
    generator = torch.Generator(device).manual_seed(columns)
    step = (torch.rand(groups, generator=generator, device=device) + 0.5) * (8 / 2**weight.bits)
    zero = torch.randint(
        -(2 ** (weight.bits - 3)),
        2 ** (weight.bits - 3),
        (groups,),
        generator=generator,
        device=device,
    )
    each = columns // groups
    return weight.with_static_input_scales(
        (1 / step).repeat_interleave(each), zero.repeat_interleave(each), step
    )
