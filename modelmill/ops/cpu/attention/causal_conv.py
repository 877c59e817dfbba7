"""Short causal convolution in C++ (causal_conv.cpp)."""

from __future__ import annotations

import torch

from modelmill.ops.causal_conv import CausalConvInputs
from modelmill.ops.cpu.attention import state_rows
from modelmill.ops.cpu.common import build

available = build.available
_kernel = build.deferred_functions(
    "causal_conv", "p" * 5 + state_rows.ROW_POINTERS_SIGNATURE + "q" * 6 + "ii"
)


def supports(inputs: CausalConvInputs) -> bool:
    """Operands of one dtype, rows and states that lie together."""
    x, state, weight, bias, rows, _ = inputs
    return (
        x.dtype in build.DTYPES
        and x.dtype is state.dtype is weight.dtype
        and x.stride(1) == 1
        and weight.is_contiguous()
        and (bias is None or (bias.dtype is x.dtype and bias.is_contiguous()))
        and state.stride()[1:] == (len(weight), 1)
        and state_rows.are_packed(rows)
    )


def run(inputs: CausalConvInputs) -> torch.Tensor:
    """As the reference."""
    x, state, weight, bias, rows, silu = inputs
    channels, width = weight.shape
    make = torch.empty if rows.is_decode else torch.zeros  # a prompt may be padded
    out = make(len(x), channels, dtype=x.dtype)
    _kernel(len(x) > build.SMALL_M_LIMIT)(
        out.data_ptr(), x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(),
        state.data_ptr(), *state_rows.row_pointers(rows), len(rows.slots), len(x), channels, width,
        x.stride(0), state.stride(0), build.DTYPES[x.dtype], int(silu),
    )  # fmt: skip
    return out
