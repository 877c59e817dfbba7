"""Fused SwiGLU with int4 weights: a warp has eight gate rows and the matching up rows."""

from __future__ import annotations

from modelmill.ops.binding import run_first_supported
from modelmill.ops.cuda.weight_only_gemm import int4_linear, wq_gemm_pipelined
from modelmill.ops.cuda.weight_only_gemm.int4_linear import available as available
from modelmill.ops.cuda.weight_only_gemm.int4_linear import supports as supports
from modelmill.ops.int4_linear_swiglu import DECLARATION

SUPPORTED_PROBLEMS = int4_linear.supported_problems(gated=True)
specializations = wq_gemm_pipelined.specializations
KERNELS = int4_linear.kernels(gated=True)
run = run_first_supported(KERNELS, DECLARATION)
