"""Products of up to 64 rows by Hopper's copy engine and tensor cores where they win; else Triton's or cuBLAS's."""

from __future__ import annotations

import torch

from modelmill.ops.cuda import build, products


def available(kind: str) -> str | None:
    """None where the kernel serves devices of this kind; else why not. Compiles one form, once a machine."""
    sizes = products.sizes_of(8, 4096, 132, gated=False)
    return build.serves(kind, "few_rows", sizes.macros(torch.bfloat16, gated=False))


def supports(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """As ``products.few_serves``: up to 64 rows in 16 bits."""
    return products.few_serves(x, weight, bias) and weight.shape[0] % 2 == 0


def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As the reference, sums in float32."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    products.few(x, weight, bias, out)
    return out
