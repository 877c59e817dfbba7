"""Whether a device has the dtype of a quantized output: a condition of ranges."""

from __future__ import annotations

import torch

from modelmill.ops.row_op_support import RowOpProblem
from modelmill.ops.triton.common.device import supports_fp8


def supports_output_dtype(problem: RowOpProblem) -> bool:
    """Whether the device has the dtype of the output."""
    spec = problem.spec
    return spec is None or spec.dtype is torch.int8 or supports_fp8(problem.device)


def supports_output_and_wide_input_dtype(problem: RowOpProblem) -> bool:
    """The same, of rows that are not in 8 bits already."""
    return supports_output_dtype(problem) and problem.dtype.itemsize > 1
