"""Residual add, RMSNorm, router and choice of experts of few tokens (add_rms_norm_router.cu)."""

from __future__ import annotations

import functools
import struct

import torch

from modelmill.ops.add_rms_norm_router import MAX_TOKENS, AddRMSNormRouterInputs, RoutedTokens
from modelmill.ops.carveout import DECODE_CARVEOUT_PERCENT
from modelmill.ops.cuda.common import build, launch
from modelmill.ops.fused_topk import SIGMOID, SOFTMAX, FusedTopkInputs

DTYPE_DEFINES = {torch.bfloat16: (), torch.float16: ("HALF",)}
_BLOCKS_PER_TOKEN, _THREADS = 8, 512
MAX_EXPERTS = _BLOCKS_PER_TOKEN * _THREADS // 32
"""One a warp: a second row of the router is read too late to be faster than three launches."""
MAX_HIDDEN, MAX_TOP_K = 4096, 32


def unavailable_reason(device_type: str) -> str | None:
    """None if the kernel supports this device type; else the reason.

    Compiles Qwen3-30B-A3B's config (cached on disk).
    """
    rules = FusedTopkInputs(torch.empty(0, 128), None, 8)
    macros = kernel_macros(torch.bfloat16, 2048, rules)
    return build.kernel_compile_failure_reason(device_type, "add_rms_norm_router", macros)


def supports(inputs: AddRMSNormRouterInputs) -> bool:
    """Few packed tokens of 16 bits, experts in one group, all on this GPU."""
    x, residual, norm_weight, _, router, rules, router_bias, selection_bias, _ = inputs
    if x.dim() != 2 or not 0 < len(x) <= MAX_TOKENS or x.dtype not in DTYPE_DEFINES:
        return False
    return (
        _supports_rules(rules)
        and _supports_sizes(len(router), x.shape[1], rules.top_k)
        and all(
            _is_none_or_contiguous(each, x.dtype) for each in (x, residual, norm_weight, router)
        )
        and _is_none_or_contiguous(router_bias, x.dtype, alignment=1)
        and _is_none_or_contiguous(selection_bias, torch.float32, alignment=1)
    )


def _supports_rules(rules: FusedTopkInputs) -> bool:
    return (
        rules.groups == 1
        and rules.local_experts is None
        and rules.scores in (SOFTMAX, SIGMOID)
        and rules.sum_eps == 0
    )


def _supports_sizes(experts: int, hidden: int, top_k: int) -> bool:
    return (
        hidden % 8 == 0
        and hidden <= MAX_HIDDEN
        and 0 < top_k <= min(experts, MAX_TOP_K)
        and experts <= MAX_EXPERTS
    )


def _is_none_or_contiguous(
    tensor: torch.Tensor | None, dtype: torch.dtype, alignment: int = 16
) -> bool:
    return tensor is None or (
        tensor.dtype == dtype and tensor.is_contiguous() and tensor.data_ptr() % alignment == 0
    )


def run(inputs: AddRMSNormRouterInputs) -> RoutedTokens:
    """Run the op; the sum overwrites the residual."""
    x, residual, norm_weight, eps, router, rules, router_bias, selection_bias, logit_scale = inputs
    tokens, hidden = x.shape
    out = torch.empty_like(x)
    weights = torch.empty((tokens, rules.top_k), dtype=torch.float32, device=x.device)
    ids = torch.empty((tokens, rules.top_k), dtype=torch.int32, device=x.device)
    macros = kernel_macros(
        x.dtype, hidden, rules, adds=residual is not None, router_bias=router_bias is not None,
        selection_bias=selection_bias is not None,
    )  # fmt: skip
    with torch.cuda.device(x.device):
        kernel = launch.compile_and_load_kernel(
            "add_rms_norm_router", "add_rms_norm_router", macros, _THREADS,
            0, x.get_device(), DECODE_CARVEOUT_PERCENT,
        )  # fmt: skip
        pointers = launch.data_pointers(
            x, norm_weight, router, residual, out, router_bias, selection_bias, weights, ids
        )
        work = struct.pack("=9Q3f4x", *pointers, eps, logit_scale, rules.scale)
        kernel.launch(_BLOCKS_PER_TOKEN * tokens, work, pdl=True)
    return RoutedTokens(out, x if residual is None else residual, weights, ids)


def kernel_macros(
    dtype: torch.dtype,
    hidden: int,
    rules: FusedTopkInputs,
    *,
    adds: bool = True,
    router_bias: bool = False,
    selection_bias: bool = False,
) -> tuple[str, ...]:
    """Of the kernel."""
    return _kernel_macros(
        dtype, hidden, rules.logits.shape[1], rules.top_k, adds, rules.scores == SIGMOID,
        rules.renormalize, router_bias, selection_bias,
    )  # fmt: skip


@functools.lru_cache(1024)
def _kernel_macros(dtype: torch.dtype, *values: int) -> tuple[str, ...]:
    names = ("K", "EXPERTS", "TOP_K", "ADDS", "SIGMOID", "RENORMALIZE", "ROUTER_BIAS")
    sizes = zip((*names, "SELECTION_BIAS"), values, strict=True)
    return (*(f"{name}={int(value)}" for name, value in sizes), *DTYPE_DEFINES[dtype])
