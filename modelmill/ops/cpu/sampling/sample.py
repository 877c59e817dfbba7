"""A token for each row in C++ (sample.cpp)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.sample import SampleInputs

available = build.available


def supports(inputs: SampleInputs) -> bool:
    """float32 logits and the parameters in the reference's dtypes."""
    logits, temperature, top_k, top_p, min_p, noise = inputs
    real = all(t.dtype is torch.float32 for t in (logits, temperature, top_p, min_p))
    return real and top_k.dtype is torch.int32 and noise.dtype is torch.float64


def run(inputs: SampleInputs) -> torch.Tensor:
    """As the reference, to the bit."""
    rows, vocab = inputs.logits.shape
    out = torch.empty(rows, dtype=torch.int64)
    # kept alive until the call returns
    packed = [t.contiguous() for t in inputs]
    _kernel()(out.data_ptr(), *(t.data_ptr() for t in packed), rows, vocab)
    return out


@functools.cache
def _kernel() -> Callable[..., Any]:
    return build.function("sample", "pppppppqq")
