"""Fused SwiGLU of a few rows with int8 weights: a warp has gate rows and matching up rows."""

from __future__ import annotations

from modelmill.ops.bound_op import make_kernel_dispatcher
from modelmill.ops.cuda.weight_only_gemm import int8_gemm_small_m, int8_linear, wq_gemm_pipelined
from modelmill.ops.cuda.weight_only_gemm.int8_linear import supports as supports
from modelmill.ops.cuda.weight_only_gemm.int8_linear import unavailable_reason as unavailable_reason
from modelmill.ops.int8_linear_swiglu import DECLARATION

SUPPORTED_PROBLEMS = int8_gemm_small_m.supported_problems(gated=True)
warmup_sizes = wq_gemm_pipelined.warmup_sizes
KERNELS = int8_linear.list_kernels_by_preference(gated=True)
run = make_kernel_dispatcher(KERNELS, DECLARATION)
