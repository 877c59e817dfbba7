"""Products with fp8 weights: fp8 activations on the tensor cores as they are, others against
weights widened to them.

Many tokens of fp8 are torch's work (rows scaled in its epilogue) where it takes them.
"""

from __future__ import annotations

import torch

from modelmill.ops.triton import launch_configs
from modelmill.ops.triton.device import available as available
from modelmill.ops.triton.device import dequantizes_in_kernel, supports_fp8
from modelmill.ops.triton.gemm_8bit import gemm_8bit, gemv_8bit, is_word_aligned
from modelmill.ops.triton.launch_configs import GemmKey, LaunchConfig, TunedConfigs
from modelmill.ops.triton.launch_configs import gemm_key as gemm_key
from modelmill.ops.triton.linear import gemm_small_m

FP8 = torch.float8_e4m3fn
SCALED_MM_MIN_ROWS = 256  # tokens from which torch's product is asked


def supports(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    x_scale: torch.Tensor | None,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> bool:
    """A device that knows fp8; rows of x and weight contiguous; few tokens where activations are
    float32.
    """
    if (
        x.dim() != 2
        or not x.numel()
        or not weight.numel()
        or x.stride(1) != 1
        or weight.stride(1) != 1
    ):
        return False
    if (
        weight.dtype != FP8
        or scale.dtype != torch.float32
        or not scale.is_contiguous()
        or not supports_fp8(x.device)
    ):
        return False
    if x_scale is None:
        return x.dtype == dtype and dequantizes_in_kernel(x)
    return (
        x.dtype == FP8
        and x_scale.dtype == torch.float32
        and x_scale.is_contiguous()
        and dtype != torch.float64
    )


def candidates(key: GemmKey) -> tuple[LaunchConfig, ...]:
    """The launch sizes that may be chosen for a product."""
    return launch_configs.candidates_8bit(key)


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    x_scale: torch.Tensor | None,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    *,
    configs: TunedConfigs | None = None,
) -> torch.Tensor:
    """As the reference; sums in float32, of fp8 on tensor cores with what bits they keep."""
    if x_scale is not None and _scaled_mm_supports(x, weight, dtype):
        rows = x_scale.expand(x.shape[0]).reshape(-1, 1).contiguous()
        return torch._scaled_mm(
            x,
            weight.t(),
            scale_a=rows,
            scale_b=scale.view(1, -1),
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=True,
        )
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=dtype, device=x.device)
    if x_scale is None:
        gemm_small_m(x, weight, scale, bias, out)
    elif is_word_aligned(x, weight):
        gemv_8bit(x, weight, scale, x_scale, bias, out, configs)
    else:
        gemm_8bit(x, weight, scale, x_scale, bias, out, configs)
    return out


def _scaled_mm_supports(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Its product with scaled rows: Hopper, bfloat16 out, sizes in sixteens."""
    if not x.is_cuda or x.shape[0] < SCALED_MM_MIN_ROWS or dtype != torch.bfloat16:
        return False
    packed = (
        x.is_contiguous()
        and weight.is_contiguous()
        and weight.shape[0] % 16 == 0
        and x.shape[1] % 16 == 0
    )
    return packed and torch.cuda.get_device_capability(x.device) == (9, 0)
