"""Short causal convolution in C++ (causal_conv.cpp)."""

from __future__ import annotations

import torch

from modelmill.ops.causal_conv import CausalConvInputs
from modelmill.ops.cpu.attention import recurrent_metadata
from modelmill.ops.cpu.common import build

unavailable_reason = build.unavailable_reason
_kernel = build.make_lazy_loader_by_gil_mode(
    "causal_conv", "p" * 5 + recurrent_metadata.METADATA_POINTERS_SIGNATURE + "q" * 6 + "ii"
)


def supports(inputs: CausalConvInputs) -> bool:
    """Operands of one dtype, rows and states that lie together."""
    x, state, weight, bias, rows, _ = inputs
    return (
        x.dtype in build.DTYPE_CODES
        and x.dtype is state.dtype is weight.dtype
        and x.stride(1) == 1
        and weight.is_contiguous()
        and (bias is None or (bias.dtype is x.dtype and bias.is_contiguous()))
        and state.stride()[1:] == (len(weight), 1)
        and recurrent_metadata.has_contiguous_metadata(rows)
    )


def run(inputs: CausalConvInputs) -> torch.Tensor:
    """As the reference."""
    x, state, weight, bias, rows, silu = inputs
    channels, width = weight.shape
    make = torch.empty if rows.is_decode else torch.zeros  # a prompt may be padded
    out = make(len(x), channels, dtype=x.dtype)
    _kernel(len(x) > build.SMALL_M_LIMIT)(
        out.data_ptr(), x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(),
        state.data_ptr(),
        *recurrent_metadata.metadata_pointers(rows), len(rows.slots), len(x), channels, width,
        x.stride(0), state.stride(0), build.DTYPE_CODES[x.dtype], int(silu),
    )  # fmt: skip
    return out
