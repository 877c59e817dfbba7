"""RMSNorm of groups of channels with a SiLU gate in C++ (gated_rms_norm.cpp)."""

from __future__ import annotations

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.gated_rms_norm import GatedRMSNormInputs

unavailable_reason = build.unavailable_reason
_kernel = build.make_lazy_function_loader("gated_rms_norm", "ppppqqqqdiii")


def supports(inputs: GatedRMSNormInputs) -> bool:
    """Activations in float32, gate and weight of one dtype, rows with contiguous columns."""
    x, gate, weight, _, _, _ = inputs
    return (
        x.dtype is torch.float32
        and x.is_contiguous()
        and gate.dtype in build.DTYPE_CODES
        and gate.stride(1) == 1
        and (weight is None or (weight.dtype is gate.dtype and weight.is_contiguous()))
    )


def run(inputs: GatedRMSNormInputs) -> torch.Tensor:
    """As the reference."""
    x, gate, weight, eps, group, gate_first = inputs
    tokens, width = x.shape
    out = torch.empty(tokens, width, dtype=gate.dtype)
    _kernel()(
        out.data_ptr(), x.data_ptr(), gate.data_ptr(),
        None if weight is None else weight.data_ptr(), tokens, width // group, group,
        gate.stride(0), eps, int(gate_first), int(weight is not None and len(weight) == group),
        build.DTYPE_CODES[gate.dtype],
    )  # fmt: skip
    return out
