"""Products with MXFP4 weights in C++ (mxfp4_linear.cpp)."""

from __future__ import annotations

from modelmill.ops.cpu.common import build
from modelmill.ops.cpu.weight_only_gemm.groupwise import GroupwiseLinearKernels
from modelmill.ops.mxfp4_linear import mxfp4_linear

unavailable_reason = build.unavailable_reason
run = GroupwiseLinearKernels("mxfp4_linear", "mxfp4_dequant", mxfp4_linear).run
