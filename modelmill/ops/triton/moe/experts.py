"""Chooses how the experts of a step's tokens are computed: pair by pair, or in sorted tiles."""

from __future__ import annotations

from collections.abc import Callable

import torch

from modelmill.ops.fused_moe import GATE_ACTIVATIONS, RELU2, FusedMoEInputs
from modelmill.ops.kernel_support import HALF_DTYPES
from modelmill.ops.triton.moe import grouped_gemm, moe_decode

MAX_EXPERTS = 1024
PAIR_KERNEL_MAX_PAIRS_PER_EXPERT = (
    0.25  # pairs for each expert up to which experts are hardly shared
)
# a pair that reads weights of 4 bits again costs less than a tile with one row
PAIR_KERNEL_MAX_PAIRS_PER_EXPERT_4BIT, PAIR_KERNEL_MAX_TOKENS_4BIT = 1.0, 16


def uses_pair_kernel(
    inputs: FusedMoEInputs, few_pairs: float = PAIR_KERNEL_MAX_PAIRS_PER_EXPERT
) -> bool:
    """Whether experts are shared by so few tokens that each pair reads its own weights.

    few_pairs: pairs of a token and its expert, for each expert, up to which this holds.
    """
    tokens, top_k = inputs.topk_ids.shape
    few = tokens * top_k <= few_pairs * inputs.num_experts
    return tokens == 1 or few or inputs.x.dtype == torch.float32


def supports_moe_operands(inputs: FusedMoEInputs, *, ungated: bool = False) -> bool:
    """16-bit or float32 x with packed rows and routing; weights and biases expert by expert.

    ungated: whether the kernel serves experts without a gate, too.
    """
    x, shared = inputs.x, inputs.shared
    dtypes = (*HALF_DTYPES, torch.float32)
    return (
        x.dtype in dtypes
        and x.dim() == 2
        and len(x) > 0
        and x.stride(1) == 1
        and inputs.topk_ids.dtype == torch.int32
        and inputs.topk_ids.is_contiguous()
        and inputs.topk_weights.is_contiguous()
        and len(inputs.gate_up) <= MAX_EXPERTS
        and inputs.gate_up.is_contiguous()
        and inputs.down.is_contiguous()
        and (shared is None or (shared.is_contiguous() and shared.dtype == x.dtype))
        and inputs.activation in (GATE_ACTIVATIONS if not ungated else (*GATE_ACTIVATIONS, RELU2))
        and all(
            bias is None or bias.is_contiguous() for bias in (inputs.gate_up_bias, inputs.down_bias)
        )
    )


def has_8bit_weights_and_scales(inputs: FusedMoEInputs, dtype: torch.dtype) -> bool:
    """Weights of an 8-bit dtype with packed float32 scales."""
    scales = (inputs.gate_up_scale, inputs.down_scale)
    return inputs.gate_up.dtype == inputs.down.dtype == dtype and all(
        scale is not None and scale.is_contiguous() and scale.dtype == torch.float32
        for scale in scales
    )


def run(inputs: FusedMoEInputs, act_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Run the op with weights of x's dtype or in 8 bits.

    act_dtype: to which 8-bit dtype activations are quantized; None: they are not.
    """
    compute: Callable[..., torch.Tensor]
    compute = moe_decode.run if uses_pair_kernel(inputs) else grouped_gemm.run
    return compute(inputs, act_dtype)
