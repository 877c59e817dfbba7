"""The gated delta rule in C++ (gated_delta_rule.cpp)."""

from __future__ import annotations

import torch

from modelmill.ops.cpu.attention import recurrent_metadata
from modelmill.ops.cpu.common import build
from modelmill.ops.gated_delta_rule import L2_EPS, GatedDeltaInputs

unavailable_reason, supports = build.unavailable_reason, recurrent_metadata.supports_recurrence
_kernel = build.make_lazy_loader_by_gil_mode(
    "gated_delta_rule", "p" * 6 + recurrent_metadata.METADATA_POINTERS_SIGNATURE + "q" * 8 + "di"
)


def run(inputs: GatedDeltaInputs) -> torch.Tensor:
    """As the reference, all tokens one by one."""
    qkv, gates, a_log, dt_bias, state, rows = inputs
    _, heads, dk, dv = state.shape
    a_log, dt_bias = (
        recurrent_metadata.to_contiguous_float32(a_log),
        recurrent_metadata.to_contiguous_float32(dt_bias),
    )
    make = torch.empty if rows.is_decode else torch.zeros  # a prompt may be padded
    out = make(len(qkv), heads * dv)
    _kernel(len(qkv) > build.SMALL_M_LIMIT)(
        out.data_ptr(), qkv.data_ptr(), gates.data_ptr(), a_log.data_ptr(), dt_bias.data_ptr(),
        state.data_ptr(),
        *recurrent_metadata.metadata_pointers(rows), len(rows.slots), len(qkv), heads,
        (qkv.shape[1] - heads * dv) // (2 * dk), dk, dv, qkv.stride(0), state.stride(0), L2_EPS,
        build.DTYPE_CODES[qkv.dtype],
    )  # fmt: skip
    return out
