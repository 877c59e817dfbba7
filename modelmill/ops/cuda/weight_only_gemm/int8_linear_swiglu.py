"""Fused SwiGLU of a few rows with int8 weights: a warp has gate rows and matching up rows."""

from __future__ import annotations

from modelmill.ops.binding import run_first_supported
from modelmill.ops.cuda.weight_only_gemm import int8_gemm_small_m, int8_linear, wq_gemm_pipelined
from modelmill.ops.cuda.weight_only_gemm.int8_linear import available as available
from modelmill.ops.cuda.weight_only_gemm.int8_linear import supports as supports
from modelmill.ops.int8_linear_swiglu import DECLARATION

SUPPORTED_PROBLEMS = int8_gemm_small_m.supported_problems(gated=True)
specializations = wq_gemm_pipelined.specializations
KERNELS = int8_linear.kernels(gated=True)
run = run_first_supported(KERNELS, DECLARATION)
