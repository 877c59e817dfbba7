"""The router of a few tokens; whichever program is the last of a token chooses its experts.

Computes: weights[M, top_k] and ids[M, top_k] of x[M, K] · weight[E, K]ᵀ
Dtypes: x and weight bfloat16, float16 or float32; weights float32; ids int32
Layout: row-major, contiguous rows
Range: M ≤ 16; E ≤ 1024, without groups of experts
Technique: GEMV with one expert's row in a program, an atomic counter for each token, ranks by
    comparing all pairs of experts, PDL
Ops: router_topk

The counters are 0 between launches: the last program resets its own. They belong to a device, on
which one stream at a time runs a model.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from modelmill.ops.router_topk import RouterTopkInputs
from modelmill.ops.triton.common.device import available as available
from modelmill.ops.triton.common.device import power_of_two
from modelmill.ops.triton.common.fast_launch import CachedLauncher
from modelmill.ops.triton.common.pdl import pdl_launch_options
from modelmill.ops.triton.moe.fused_topk import MAX_COMPARED, MAX_EXPERTS, choose_experts
from modelmill.ops.triton.moe.router_gemm import MAX_GEMV_ROWS, dot_product


def supports(inputs: RouterTopkInputs) -> bool:
    """Few tokens, contiguous rows, one group."""
    x, weight, bias = inputs.x, inputs.weight, inputs.bias
    return (
        inputs.groups == 1
        and x.dim() == 2
        and 0 < len(x) <= MAX_GEMV_ROWS
        and 0 < len(weight) <= MAX_EXPERTS
        and x.stride(1) == weight.stride(1) == 1
        and torch.float64 not in (x.dtype, weight.dtype)
        and (bias is None or (bias.is_contiguous() and bias.dtype != torch.float64))
    )


@functools.cache
def _counters(device: torch.device) -> torch.Tensor:
    """Programs of each token that have ended."""
    return torch.zeros(MAX_GEMV_ROWS, dtype=torch.int32, device=device)


def run(inputs: RouterTopkInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the op with one launch."""
    x, weight, bias, top_k = inputs[:4]
    (tokens, k), experts, device = x.shape, len(weight), x.device
    logits = torch.empty((tokens, experts), dtype=torch.float32, device=device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=device)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=device)
    block, block_e = min(2048, max(8, power_of_two(k))), max(16, power_of_two(experts))
    pdl = pdl_launch_options(device, tokens)
    sizes = (experts, k, x.stride(0), weight.stride(0))
    _launcher(
        (experts, tokens, 1),
        (x, weight, logits if bias is None else bias, logits, _counters(device), weights, ids),
        (*sizes, float(inputs.scale)), sizes,
        (
            top_k, inputs.sigmoid, inputs.renormalize, bias is not None, k % block == 0, block,
            block_e, min(block_e, MAX_COMPARED // block_e), pdl["PDL"],
        ),
        {"num_warps": 4, "launch_pdl": pdl["launch_pdl"]},
    )  # fmt: skip
    return weights, ids


@triton.jit
def _kernel(
    x_ptr, weight_ptr, bias_ptr, logits_ptr, counter_ptr, weights_ptr, ids_ptr,
    experts, k, x_stride, stride, scale,
    TOP_K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, BIAS: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    expert, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    logit = dot_product(
        x_ptr + token * x_stride, weight_ptr + expert * stride, k, EVEN, BLOCK_K, PDL
    )
    tl.store(logits_ptr + token * experts + expert, logit)
    # the store comes before the count, and the last program sees all stores
    ended = tl.atomic_add(counter_ptr + token, 1, sem="acq_rel", scope="gpu")
    if ended == experts - 1:
        choose_experts(
            logits_ptr, bias_ptr, weights_ptr, ids_ptr, token, experts, scale,
            TOP_K, SIGMOID, RENORMALIZE, BIAS, BLOCK_E, CHUNK,
        )  # fmt: skip
        tl.store(counter_ptr + token, 0)


_launcher = CachedLauncher(_kernel)
