"""A token for each row in C++ (sample.cpp)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from modelmill.ops.cpu.common import build

available = build.available


def supports(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    noise: torch.Tensor,
) -> bool:
    """float32 logits and the parameters in the reference's dtypes."""
    real = all(t.dtype is torch.float32 for t in (logits, temperature, top_p, min_p))
    return real and top_k.dtype is torch.int32 and noise.dtype is torch.float64


def run(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    noise: torch.Tensor,
) -> torch.Tensor:
    """As the reference, to the bit."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64)
    # kept alive until the call returns
    inputs = [t.contiguous() for t in (logits, temperature, top_k, top_p, min_p, noise)]
    _kernel()(out.data_ptr(), *(t.data_ptr() for t in inputs), rows, vocab)
    return out


@functools.cache
def _kernel() -> Callable[..., Any]:
    return build.function("sample", "pppppppqq")
