"""The router of a mixture of experts in C++ (router_gemm.cpp)."""

from __future__ import annotations

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.cpu.common.gemm import load_gemm_function
from modelmill.ops.router_gemm import scale_logits_and_add_bias

unavailable_reason = build.unavailable_reason


def supports(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,  # noqa: ARG001  torch adds it
    scale: float = 1.0,  # noqa: ARG001
) -> bool:
    """A few packed rows, of the weight's dtype."""
    return (
        x.dtype is weight.dtype
        and x.dtype in build.DTYPE_CODES
        and x.dim() == 2
        and x.shape[0] <= build.SMALL_M_LIMIT
        and x.is_contiguous()
        and weight.is_contiguous()
    )


def run(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, scale: float = 1.0
) -> torch.Tensor:
    """As the reference, with float32 sums."""
    rows, experts = x.shape[0], weight.shape[0]
    out = torch.empty(rows, experts)
    load_gemm_function("router_gemm", "pppqqqi")(
        out.data_ptr(), x.data_ptr(), weight.data_ptr(), rows, x.shape[1], experts,
        build.DTYPE_CODES[x.dtype],
    )  # fmt: skip
    return scale_logits_and_add_bias(out, bias, scale)
