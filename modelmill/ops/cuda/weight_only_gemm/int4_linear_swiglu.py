"""Fused SwiGLU with int4 weights: a warp has eight gate rows and the matching up rows."""

from __future__ import annotations

from modelmill.ops.bound_op import make_kernel_dispatcher
from modelmill.ops.cuda.weight_only_gemm import int4_linear, wq_gemm_pipelined
from modelmill.ops.cuda.weight_only_gemm.int4_linear import supports as supports
from modelmill.ops.cuda.weight_only_gemm.int4_linear import unavailable_reason as unavailable_reason
from modelmill.ops.int4_linear_swiglu import DECLARATION

SUPPORTED_PROBLEMS = int4_linear.supported_problems(gated=True)
warmup_sizes = wq_gemm_pipelined.warmup_sizes
KERNELS = int4_linear.list_kernels_by_preference(gated=True)
run = make_kernel_dispatcher(KERNELS, DECLARATION)
