"""fp8 products in float32 on a GPU: long sums are not made smaller by the tensor cores."""

from __future__ import annotations

import pytest
import torch

from modelmill.ops import fp8_linear
from modelmill.ops.cuda.w8a8_gemm import fp8_linear as cuda_fp8_linear
from modelmill.ops.registry import select_backends
from modelmill.ops.w8a8_linear import Linear8BitInputs, make_linear_8bit_problem

GAIN_LIMIT = 2e-4  # a fifth of what acceptance allows a module in float32


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1536, 11008])
@pytest.mark.parametrize("rows", [1, 8, 64, 512, 2100])
def test_sums_keep_their_size(rows: int, k: int) -> None:
    from modelmill.ops.triton.common.device import supports_fp8

    if not supports_fp8(torch.device("cuda")):
        pytest.skip("the device has no fp8")
    args = fp8_linear.random_inputs(rows, k, 1024, device="cuda")
    wide = {name: each.double() for name, each in args.items()}
    expected = fp8_linear.fp8_linear(Linear8BitInputs(**wide, dtype=torch.float64))
    linear = select_backends("cuda").fp8_linear
    actual = linear(Linear8BitInputs(**args, dtype=torch.float32)).double()
    gain = float((actual * expected).sum() / expected.square().sum())
    assert abs(gain - 1) < GAIN_LIMIT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_kernel_that_cuts_bits_serves_no_float32(dtype: torch.dtype) -> None:
    args = fp8_linear.random_inputs(64, 1536, 64, device="cpu")
    problem = make_linear_8bit_problem(**args, dtype=dtype)
    ranges = cuda_fp8_linear.SUPPORTED_PROBLEMS
    assert any(each.covers(problem) for each in ranges) == (dtype is not torch.float32)
