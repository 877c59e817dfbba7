"""Products with 4-bit weights in C++ (int4_linear.cpp)."""

from __future__ import annotations

from modelmill.ops.cpu import build
from modelmill.ops.cpu.groups import Grouped
from modelmill.ops.int4_linear import int4_linear

available = build.available
run = Grouped("int4_linear", "int4_widen", int4_linear).run
