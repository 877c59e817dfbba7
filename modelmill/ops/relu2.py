"""The square of ReLU (Primer, arXiv:2109.08668)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from modelmill.ops.case import Case
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.gelu import cases_for_shapes

DECLARATION = OpDeclaration()

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def relu2(x: torch.Tensor) -> torch.Tensor:
    """Compute max(x, 0)², any shape."""
    return F.relu(x).square()


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """A decode step's width and an odd one."""
    yield from cases_for_shapes(((1, 512), (7, 101)), device, dtype)
