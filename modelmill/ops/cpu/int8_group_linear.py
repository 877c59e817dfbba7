"""Products with 8-bit weights in groups in C++ (int8_group_linear.cpp)."""

from __future__ import annotations

from modelmill.ops.cpu import build
from modelmill.ops.cpu.groups import Grouped
from modelmill.ops.int8_group_linear import int8_group_linear

available = build.available
run = Grouped("int8_group_linear", "int8_group_widen", int8_group_linear).run
