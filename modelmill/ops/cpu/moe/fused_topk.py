"""The experts of each token in C++ (fused_topk.cpp)."""

from __future__ import annotations

import numpy as np
import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.cpu.common.gemm import load_gemm_function
from modelmill.ops.fused_topk import (
    SCORE_FUNCTIONS,
    SPARSE_MIXER,
    FusedTopkInputs,
    map_to_local_experts,
)

unavailable_reason = build.unavailable_reason


def supports(inputs: FusedTopkInputs) -> bool:
    """Packed float32 logits, and rules that the kernel has."""
    logits = inputs.logits
    return (
        logits.dtype is torch.float32
        and logits.dim() == 2
        and logits.is_contiguous()
        and supports_topk_rules(inputs, logits.shape[1])
    )


def supports_topk_rules(inputs: FusedTopkInputs, experts: int) -> bool:
    """Whether the kernel chooses so among ``experts``; the logits are not looked at."""
    size, rest = divmod(experts, inputs.groups)
    bias = inputs.bias
    if inputs.scores == SPARSE_MIXER and (bias is not None or inputs.groups > 1):
        return False
    return (
        0 < inputs.top_k <= experts
        and rest == 0
        and inputs.group_scores in (1, 2)
        and (inputs.groups == 1 or size >= inputs.group_scores)
        and (bias is None or (bias.dtype in build.DTYPE_CODES and bias.is_contiguous()))
    )


def run(inputs: FusedTopkInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the op."""
    rows, experts = inputs.logits.shape
    weights = torch.empty(rows, inputs.top_k)
    ids = torch.empty(rows, inputs.top_k, dtype=torch.int32)
    rules = np.array(pack_topk_rules(inputs, experts), dtype=np.int64)
    load_gemm_function("fused_topk", "ppppq", release_gil=rows > build.SMALL_M_LIMIT)(
        weights.data_ptr(), ids.data_ptr(), inputs.logits.data_ptr(), rules.ctypes.data, rows
    )
    return map_to_local_experts(weights, ids, inputs.local_experts)


def pack_topk_rules(inputs: FusedTopkInputs, experts: int) -> list[int]:
    """TopkRules of topk.h."""
    bias = inputs.bias
    return [
        0 if bias is None else bias.data_ptr(),
        0 if bias is None else build.DTYPE_CODES[bias.dtype],
        experts, inputs.top_k, SCORE_FUNCTIONS.index(inputs.scores), int(inputs.renormalize),
        inputs.groups, inputs.top_groups, inputs.group_scores, double_to_bits(inputs.scale),
        double_to_bits(inputs.jitter), double_to_bits(inputs.sum_eps),
    ]  # fmt: skip


def double_to_bits(value: float) -> int:
    """The bits of a double, for words that a C++ struct is made of."""
    return int(np.float64(value).view(np.int64))
