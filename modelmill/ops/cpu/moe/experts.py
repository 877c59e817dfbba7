"""Calls of the C++ experts (experts.h)."""

from __future__ import annotations

import numpy as np
import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.cpu.common.gemm import load_gemm_function
from modelmill.ops.cpu.weight_only_gemm.groupwise import SCALE_DTYPE_CODES
from modelmill.ops.fused_moe import GATE_ACTIVATIONS, RELU2, FusedMoEInputs, SwigluOaiParams
from modelmill.ops.groupwise import PACK_COLUMNS

GATE_CODES = {name: code for code, name in enumerate(GATE_ACTIVATIONS)}
CLAMPED_SWIGLU_CODE = len(GATE_CODES)
GATE_CODES[RELU2] = CLAMPED_SWIGLU_CODE + 1
"""Of expert_matrices.h."""
UNUSED_SWIGLU_CLAMP = SwigluOaiParams(0.0, 0.0)


def supports_moe_operands(inputs: FusedMoEInputs, weight_dtype: torch.dtype) -> bool:
    """Packed operands in whole runs of columns; an expert's rows follow each other."""
    x, ids = inputs.x, inputs.topk_ids
    if x.dtype not in build.DTYPE_CODES or x.dim() != 2 or not x.is_contiguous():
        return False
    if x.shape[1] % PACK_COLUMNS or inputs.inner_size % PACK_COLUMNS:
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
        and inputs.activation in GATE_CODES
        and all(t is None or (t.dtype is x.dtype and t.is_contiguous()) for t in of_x)
        and all(
            weight.dtype is weight_dtype and _is_each_expert_contiguous(weight)
            for weight in (inputs.gate_up, inputs.down)
        )
    )


def supports_scales_and_offsets(inputs: FusedMoEInputs, *dtypes: torch.dtype) -> bool:
    """Scales of one of these dtypes, and offsets like them or none."""
    scales = (inputs.gate_up_scale, inputs.down_scale)
    offsets = (inputs.gate_up_offset, inputs.down_offset)
    first = scales[0]
    return (
        first is not None
        and first.dtype in dtypes
        and all(
            s is not None and s.dtype is first.dtype and _is_each_expert_contiguous(s)
            for s in scales
        )
        and all(
            o is None or (o.dtype is first.dtype and _is_each_expert_contiguous(o)) for o in offsets
        )
    )


def _is_each_expert_contiguous(stack: torch.Tensor) -> bool:
    return stack[0].is_contiguous()


def run_experts(name: str, inputs: FusedMoEInputs) -> torch.Tensor:
    """Compute the op by the C function ``name``."""
    x = inputs.x
    out = torch.empty_like(x)
    words = np.array(pack_experts_call(inputs, out), dtype=np.int64)
    function = load_gemm_function(name, "pddii", release_gil=len(x) > build.SMALL_M_LIMIT)
    clamp = inputs.clamp or UNUSED_SWIGLU_CLAMP
    function(words.ctypes.data, *clamp, build.DTYPE_CODES[x.dtype], scale_dtype_code(inputs))
    return out


def scale_dtype_code(inputs: FusedMoEInputs) -> int:
    """The code of the scales' dtype."""
    assert inputs.gate_up_scale is not None, "see supports_scales_and_offsets"
    return SCALE_DTYPE_CODES[inputs.gate_up_scale.dtype]


def pack_experts_call(inputs: FusedMoEInputs, out: torch.Tensor) -> list[int]:
    """ExpertsCall of expert_matrices.h."""
    x, gate_up = inputs.x, inputs.gate_up
    gate = GATE_CODES[inputs.activation] if inputs.clamp is None else CLAMPED_SWIGLU_CODE
    return [
        out.data_ptr(), x.data_ptr(), inputs.topk_weights.data_ptr(), inputs.topk_ids.data_ptr(),
        tensor_address(inputs.shared), *inputs.topk_ids.shape, len(gate_up), inputs.group, gate,
        *_expert_matrices_words(inputs, "gate_up", x.shape[1]),
        *_expert_matrices_words(inputs, "down", inputs.inner_size),
    ]  # fmt: skip


def _expert_matrices_words(inputs: FusedMoEInputs, name: str, columns: int) -> list[int]:
    """ExpertMatrices: addresses, the experts' distances in bytes, rows, columns."""
    stacks = [getattr(inputs, name + suffix) for suffix in ("", "_scale", "_offset")]
    addresses = [tensor_address(each) for each in (*stacks, getattr(inputs, f"{name}_bias"))]
    distances = [0 if each is None else each.stride(0) * each.itemsize for each in stacks]
    return [*addresses, *distances, stacks[0].shape[1], columns]


def tensor_address(tensor: torch.Tensor | None) -> int:
    """Where a tensor lies; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()
