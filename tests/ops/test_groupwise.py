"""Products with group-wise weights: the meaning of the reference, and what kernels support."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.ops import int4_linear, int8_group_linear, registry
from modelmill.ops.groupwise import GroupwiseLinearInputs

OPS = {"int4_linear": int4_linear, "int8_group_linear": int8_group_linear}


def value_of(
    op: ModuleType, tensors: dict[str, torch.Tensor | None], group: int, row: int, column: int
) -> float:
    """One weight read from its byte, as the layout is documented."""
    weight, scale, offset = tensors["weight"], tensors["scale"], tensors["offset"]
    assert weight is not None
    assert scale is not None
    run, column_in_run = divmod(column, 32)
    if op is int4_linear:
        byte = int(weight[row, run * 16 + column_in_run % 16])
        code, zero_point = (byte >> 4 if column_in_run >= 16 else byte & 15), 8
    else:
        code, zero_point = int(weight[row, column]), 0
    step = float(scale[row, column // group])
    return (
        (code - zero_point) * step
        if offset is None
        else code * step + float(offset[row, column // group])
    )


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@given(
    st.integers(1, 3),
    st.integers(1, 140),
    st.integers(1, 4),
    st.sampled_from([32, 64, 96, 128]),
    st.booleans(),
)
@settings(deadline=None, max_examples=25)
def test_the_reference_multiplies_with_the_weights_of_its_layout(
    op: ModuleType, rows: int, k: int, n: int, group: int, symmetric: bool
) -> None:
    tensors = op.random_weight(n, k, group, device="cpu", symmetric=symmetric)
    generator = torch.Generator().manual_seed(k)
    x, bias = (
        torch.randn(size, generator=generator, dtype=torch.float64) for size in ((rows, k), (n,))
    )
    weight64 = torch.tensor(
        [[value_of(op, tensors, group, i, j) for j in range(k)] for i in range(n)],
        dtype=torch.float64,
    )
    product = getattr(op, op.__name__.split(".")[-1])
    actual = product(GroupwiseLinearInputs(x, **tensors, group=group, bias=bias))
    assert actual.dtype is torch.float64
    assert torch.allclose(actual, x @ weight64.T + bias, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", [*OPS, "int8_linear", "fp8_linear"])
def test_float64_is_left_to_the_reference(op: str) -> None:
    """No GPU kernel accumulates in float64: it would fail to compile or silently round."""
    module = registry.implementations(op).get("triton")
    if module is None:
        pytest.skip("needs triton: pip install -e '.[gpu]'")
    served = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        cases = import_module(f"modelmill.ops.{op}").cases("cpu", dtype)
        served[dtype] = any(
            registry.backend_serves_args(op, "triton", **case.args)
            for case in cases
            if "8x8" not in case.name
        )
    assert served == {torch.bfloat16: True, torch.float32: True, torch.float64: False}
