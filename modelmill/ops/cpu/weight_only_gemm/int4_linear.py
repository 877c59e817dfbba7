"""Products with 4-bit weights in C++ (int4_linear.cpp)."""

from __future__ import annotations

from modelmill.ops.cpu.common import build
from modelmill.ops.cpu.weight_only_gemm.groupwise import GroupwiseLinearKernels
from modelmill.ops.int4_linear import int4_linear

unavailable_reason = build.unavailable_reason
run = GroupwiseLinearKernels("int4_linear", "int4_dequant", int4_linear).run
