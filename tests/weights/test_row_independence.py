"""Rows of a product are independent: NaN or infinity of one row (an overflow in another request)
stays there.

With AMX, oneDNN's products in 16 bits read beyond a row's end where it is no whole number of 32
columns (seen with torch 2.13 on a Xeon); on processors without it these tests have never failed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from modelmill.ops.linear import linear
from modelmill.ops.registry import select_backends
from modelmill.weights import base

FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "int8": ("int8", {}),
    "int4": ("int4", {"group_size": 16}),
    "int4, one group": ("int4", {"group_size": 256}),
    "w8a8": ("w8a8", {}),
    "fp8": ("fp8", {}),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("columns", [80, 96, 172])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_no_number_in_one_row_stays_there(
    name: str, columns: int, dtype: torch.dtype
) -> None:
    weight_format, layout = FORMATS[name]
    if layout.get("group_size") == 16 and columns % 16:
        pytest.skip("groups of 16 do not divide such rows")
    weight = base.pack_as_format(weight_format, torch.randn(48, columns), dtype, **layout)
    for ops in (
        select_backends("cpu"),
        select_backends("cpu", dict.fromkeys(("linear", "int8_linear", "int4_linear"), "torch")),
    ):
        for rows in (2, 17, 33, 130):
            x = torch.randn(rows, columns).to(dtype)
            x[rows // 2] = float("nan")
            out = weight.matmul(x, None, ops)
            assert out.isnan().any(1).nonzero().flatten().tolist() == [rows // 2]


def test_gaps_between_rows_are_not_read() -> None:
    wide = torch.full((33, 104), float("nan"), dtype=torch.bfloat16)
    wide[:, :80] = torch.randn(33, 80)
    weight = torch.randn(20, 80, dtype=torch.bfloat16)
    expected = wide[:, :80].double() @ weight.double().T
    torch.testing.assert_close(linear(wide[:, :80], weight).double(), expected, atol=0.1, rtol=0.02)
