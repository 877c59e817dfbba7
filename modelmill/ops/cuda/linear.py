"""Products of up to 64 rows by Hopper's copy engine and tensor cores where they win; else Triton's
or cuBLAS's.
"""

from __future__ import annotations

import torch

from modelmill.ops.cuda import build, gemm


def available(device_type: str) -> str | None:
    """None where the kernel serves devices of this kind; else why not.

    Compiles one form, once a machine.
    """
    sizes = gemm.small_m_config(8, 4096, 132, gated=False)
    return build.why_unavailable(
        device_type, "gemm_small_m", sizes.macros(torch.bfloat16, gated=False)
    )


def supports(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """As ``products.supports_small_m``: up to 64 rows in 16 bits."""
    return gemm.supports_small_m(x, weight, bias) and weight.shape[0] % 2 == 0


def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As the reference, sums in float32."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    gemm.gemm_small_m(x, weight, bias, out)
    return out
