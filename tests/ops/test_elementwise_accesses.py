"""Elementwise Triton kernels load and store 16 bytes at a time where the sizes allow it."""

from __future__ import annotations

import pytest

from tests.run_code import run_code

COMPILE = """
import os, re
os.environ.pop("TRITON_INTERPRET", None)
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from {module} import _kernel
names = _kernel.arg_names
numbers = {{"BLOCK": 2048, "EVEN": True, "PDL": False}}
types = {{name: "*bf16" if name.endswith("_ptr") else "i32" for name in names}}
source = ASTSource(
    _kernel,
    {{name: "constexpr" if name in numbers else types[name] for name in names}},
    {{(names.index(name),): number for name, number in numbers.items()}},
    {{(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name.endswith("_ptr")}},
)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={{"num_warps": 8}})
accesses = set(re.findall(r"(?:ld|st)[.]global[.a-z0-9]*", compiled.asm["ptx"]))
assert accesses == {{"ld.global.v4.b32", "st.global.v4.b32"}}, accesses
"""


@pytest.mark.parametrize(
    "module",
    ["modelmill.ops.triton.norm_quantize.relu2", "modelmill.ops.triton.attention.sigmoid_mul"],
)
def test_even_sizes_are_accessed_by_16_bytes(module: str) -> None:
    pytest.importorskip("triton", reason="pip install triton")
    run_code(COMPILE.format(module=module))
