"""MXFP4's scales: powers of two by their exponents (OCP Microscaling, E8M0), without a warning."""

from __future__ import annotations

import warnings

import pytest
import torch

from modelmill.ops.mxfp4_linear import e8m0_to_scales


@pytest.mark.parametrize("shape", [(256,), (16, 16), (4, 8, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_scales_of_every_code(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).reshape(shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warned that it enlarged an output of one element
        values = e8m0_to_scales(codes, dtype)
    expected = torch.tensor([2.0 ** (code - 127) for code in range(255)], dtype=torch.float64)
    assert values.dtype == dtype
    assert values.shape == shape
    assert torch.equal(values.flatten()[:255].double(), expected.to(dtype).double())
    assert bool(values.flatten()[255].isnan())
