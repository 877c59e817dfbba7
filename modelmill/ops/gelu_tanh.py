"""Tanh approximation of GELU ("gelu_new"), as used by GPT-2 (arXiv:1606.08415)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from modelmill.ops.case import Case
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.gelu import cases_for_shapes as cases_for_shapes
from modelmill.ops.operand_guards import make_row_op_guard
from modelmill.ops.row_op_support import make_row_op_problem

DECLARATION = OpDeclaration(problem=make_row_op_problem, operands=("x",), guard=make_row_op_guard)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Compute 0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))), any shape."""
    return F.gelu(x, approximate="tanh")


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """GPT-2's MLP width and an odd one."""
    yield from cases_for_shapes(((1, 4096), (7, 101), (64, 3072)), device, dtype)
