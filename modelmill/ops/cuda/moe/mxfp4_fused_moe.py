"""The experts of a mixture with MXFP4 weights, few rows for each.

Of one token they are moe_decode_mxfp4.cu's, of more grouped_gemm_wq.cu's.
"""

from __future__ import annotations

import torch

from modelmill.ops.bound_op import make_kernel_dispatcher
from modelmill.ops.cuda.moe import grouped_gemm_wq, moe_decode_mxfp4
from modelmill.ops.cuda.moe.grouped_gemm_wq import supports as supports
from modelmill.ops.cuda.moe.grouped_gemm_wq import unavailable_reason as unavailable_reason
from modelmill.ops.kernel_support import Kernel
from modelmill.ops.mxfp4_fused_moe import DECLARATION

MIN_TOKENS = 2
SUPPORTED_PROBLEMS = (
    moe_decode_mxfp4.SUPPORTED_PROBLEMS,
    grouped_gemm_wq.moe_support_range(MIN_TOKENS, (torch.bfloat16,), torch.uint8, torch.uint8),
)
KERNELS = tuple(
    Kernel(each, run)
    for each, run in zip(
        SUPPORTED_PROBLEMS, (moe_decode_mxfp4.run, grouped_gemm_wq.run), strict=True
    )
)
run = make_kernel_dispatcher(KERNELS, DECLARATION)
