"""Calls of the C++ experts (experts.h)."""

from __future__ import annotations

import numpy as np
import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.cpu.common.gemm import gemm_function
from modelmill.ops.cpu.weight_only_gemm.groupwise import SCALE_TYPES
from modelmill.ops.fused_moe import ACTIVATIONS, FusedMoEInputs, SwigluClamp
from modelmill.ops.groupwise import PACK_COLUMNS

CLAMPED_SWIGLU = len(ACTIVATIONS)
"""The gate's code in experts.h, behind those of ACTIVATIONS."""
NO_CLAMP = SwigluClamp(0.0, 0.0)


def supports_layout(inputs: FusedMoEInputs, weight_dtype: torch.dtype) -> bool:
    """Packed operands in whole runs of columns; an expert's rows follow each other."""
    x, ids = inputs.x, inputs.topk_ids
    if x.dtype not in build.DTYPES or x.dim() != 2 or not x.is_contiguous():
        return False
    if x.shape[1] % PACK_COLUMNS or inputs.gate_up.shape[1] % (2 * PACK_COLUMNS):
        return False
    routing = (
        ids.dtype is torch.int32
        and inputs.topk_weights.dtype is torch.float32
        and ids.is_contiguous()
        and inputs.topk_weights.is_contiguous()
    )
    of_x = (inputs.shared, inputs.gate_up_bias, inputs.down_bias)
    return (
        routing
        and inputs.activation in ACTIVATIONS
        and all(t is None or (t.dtype is x.dtype and t.is_contiguous()) for t in of_x)
        and all(
            weight.dtype is weight_dtype and _packs_experts(weight)
            for weight in (inputs.gate_up, inputs.down)
        )
    )


def supports_grids(inputs: FusedMoEInputs, *dtypes: torch.dtype) -> bool:
    """Scales of one of these dtypes, and offsets like them or none."""
    scales = (inputs.gate_up_scale, inputs.down_scale)
    offsets = (inputs.gate_up_offset, inputs.down_offset)
    first = scales[0]
    return (
        first is not None
        and first.dtype in dtypes
        and all(s is not None and s.dtype is first.dtype and _packs_experts(s) for s in scales)
        and all(o is None or (o.dtype is first.dtype and _packs_experts(o)) for o in offsets)
    )


def _packs_experts(stack: torch.Tensor) -> bool:
    return stack[0].is_contiguous()


def run_experts(name: str, inputs: FusedMoEInputs) -> torch.Tensor:
    """Compute the op by the C function ``name``."""
    x, scale = inputs.x, inputs.gate_up_scale
    assert scale is not None, "see supports_grids"
    out = torch.empty_like(x)
    gate = ACTIVATIONS.index(inputs.activation) if inputs.clamp is None else CLAMPED_SWIGLU
    words = np.array(
        (
            out.data_ptr(), x.data_ptr(), inputs.topk_weights.data_ptr(),
            inputs.topk_ids.data_ptr(), _address(inputs.shared), *inputs.topk_ids.shape,
            len(inputs.gate_up), inputs.group, gate,
            *_matrices(inputs, "gate_up", x.shape[1]),
            *_matrices(inputs, "down", inputs.gate_up.shape[1] // 2),
        ),
        dtype=np.int64,
    )  # fmt: skip
    function = gemm_function(name, "pddii", release_gil=len(x) > build.SMALL_M_LIMIT)
    clamp = inputs.clamp or NO_CLAMP
    function(words.ctypes.data, *clamp, build.DTYPES[x.dtype], SCALE_TYPES[scale.dtype])
    return out


def _matrices(inputs: FusedMoEInputs, name: str, columns: int) -> list[int]:
    """ExpertMatrices of experts.h: addresses, the experts' distances in bytes, rows, columns."""
    stacks = [getattr(inputs, name + suffix) for suffix in ("", "_scale", "_offset")]
    addresses = [_address(each) for each in (*stacks, getattr(inputs, f"{name}_bias"))]
    distances = [0 if each is None else each.stride(0) * each.itemsize for each in stacks]
    return [*addresses, *distances, stacks[0].shape[1], columns]


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
