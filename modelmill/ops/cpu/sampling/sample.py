"""A token for each row in C++ (sample.cpp)."""

from __future__ import annotations

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.sample import SAMPLE_SUPPORT_RANGE, SampleInputs

unavailable_reason = build.unavailable_reason
_kernel = build.make_lazy_function_loader("sample", "pppppppqq")
SUPPORTED_PROBLEMS = (SAMPLE_SUPPORT_RANGE,)


def run(inputs: SampleInputs) -> torch.Tensor:
    """As the reference, to the bit."""
    rows, vocab = inputs.logits.shape
    out = torch.empty(rows, dtype=torch.int64)
    # kept alive until the call returns
    packed = [t.contiguous() for t in inputs]
    _kernel()(out.data_ptr(), *(t.data_ptr() for t in packed), rows, vocab)
    return out
