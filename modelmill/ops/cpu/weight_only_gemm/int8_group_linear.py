"""Products with 8-bit weights in groups in C++ (int8_group_linear.cpp)."""

from __future__ import annotations

from modelmill.ops.cpu.common import build
from modelmill.ops.cpu.weight_only_gemm.groupwise import GroupwiseLinearKernels
from modelmill.ops.int8_group_linear import int8_group_linear

unavailable_reason = build.unavailable_reason
run = GroupwiseLinearKernels("int8_group_linear", "int8_group_dequant", int8_group_linear).run
