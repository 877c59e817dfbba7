"""The gated delta rule in C++ (gated_delta_rule.cpp)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from modelmill.ops.cpu.attention.state_rows import POINTERS, are_packed, as_floats, row_pointers
from modelmill.ops.cpu.common import build
from modelmill.ops.gated_delta_rule import L2_EPS, GatedDeltaInputs
from modelmill.ops.state_rows import has_packed_operands

available = build.available


def supports(inputs: GatedDeltaInputs) -> bool:
    """Dtypes of the kernel; rows and states that lie together."""
    return (
        inputs.qkv.dtype in build.DTYPES
        and inputs.gates.dtype is torch.float32
        and has_packed_operands(inputs.qkv, inputs.gates, inputs.state)
        and are_packed(inputs.rows)
    )


def run(inputs: GatedDeltaInputs) -> torch.Tensor:
    """As the reference, all tokens one by one."""
    qkv, gates, a_log, dt_bias, state, rows = inputs
    _, heads, dk, dv = state.shape
    a_log, dt_bias = as_floats(a_log), as_floats(dt_bias)
    make = torch.empty if rows.is_decode else torch.zeros  # a prompt may be padded
    out = make(len(qkv), heads * dv)
    _kernel(len(qkv) > build.SMALL_M_LIMIT)(
        out.data_ptr(), qkv.data_ptr(), gates.data_ptr(), a_log.data_ptr(), dt_bias.data_ptr(),
        state.data_ptr(), *row_pointers(rows), len(rows.slots), len(qkv), heads,
        (qkv.shape[1] - heads * dv) // (2 * dk), dk, dv, qkv.stride(0), state.stride(0), L2_EPS,
        build.DTYPES[qkv.dtype],
    )  # fmt: skip
    return out


@functools.cache
def _kernel(release_gil: bool) -> Callable[..., Any]:
    signature = "p" * 6 + POINTERS + "q" * 8 + "di"
    return build.function("gated_delta_rule", signature, release_gil=release_gil)
