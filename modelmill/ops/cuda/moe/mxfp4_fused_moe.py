"""The experts of a mixture with MXFP4 weights, few rows for each (grouped_gemm_wq.cu)."""

from __future__ import annotations

import torch

from modelmill.ops.cuda.moe import grouped_gemm_wq
from modelmill.ops.cuda.moe.grouped_gemm_wq import available as available
from modelmill.ops.cuda.moe.grouped_gemm_wq import supports as supports
from modelmill.ops.fused_moe import FusedMoEInputs
from modelmill.ops.moe_range import MoERange, moe_problem

MIN_TOKENS = 2  # fewer are faster pair by pair, in Triton
SUPPORTED_PROBLEMS = (
    MoERange(
        m=(MIN_TOKENS, grouped_gemm_wq.MAX_TOKENS),
        dtypes=(torch.bfloat16,),
        weight_dtype=torch.uint8,
        scale_dtypes=(torch.uint8,),
        max_pairs_per_expert=grouped_gemm_wq.MAX_PAIRS_PER_EXPERT,
        offset=False,
        ungated=False,
        fits=grouped_gemm_wq.fits,
        faster=grouped_gemm_wq.has_few_blocks,
    ),
)


def run(inputs: FusedMoEInputs) -> torch.Tensor:
    """Run the op."""
    return grouped_gemm_wq.run(inputs, moe_problem(*inputs))
