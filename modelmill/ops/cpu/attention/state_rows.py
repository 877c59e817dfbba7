"""The sequences of a step as the C++ kernels of recurrences take them (state_rows.h)."""

from __future__ import annotations

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.gated_delta_rule import GatedDeltaInputs
from modelmill.ops.ssd_scan import SSDScanInputs
from modelmill.ops.state_rows import has_packed_operands

ROW_POINTERS_SIGNATURE = "ppppp"
"""Argument types of ``row_pointers`` in a kernel's signature (``build.function``)."""


def row_pointers(rows: tuple[torch.Tensor | int, ...]) -> tuple[int, ...]:
    """The addresses of the first tokens, positions, slots and snapshots of a ``StateRows``."""
    return tuple(each.data_ptr() for each in rows[:5] if isinstance(each, torch.Tensor))


def are_packed(rows: tuple[torch.Tensor | int, ...]) -> bool:
    """Whether the tensors of a ``StateRows`` have the kernels' dtypes and lie together."""
    dtypes = (torch.int32, *(torch.int64,) * 4)
    return all(
        isinstance(each, torch.Tensor) and each.dtype is dtype and each.is_contiguous()
        for each, dtype in zip(rows, dtypes, strict=False)
    )


def supports_recurrence(inputs: GatedDeltaInputs | SSDScanInputs) -> bool:
    """Whether tokens and gates have the kernels' dtypes, and rows and states lie together."""
    tokens, gates = inputs[:2]
    return (
        tokens.dtype in build.DTYPES
        and gates.dtype is torch.float32
        and has_packed_operands(tokens, gates, inputs.state)
        and are_packed(inputs.rows)
    )


def as_floats(values: torch.Tensor) -> torch.Tensor:
    """Packed float32 values; the tensor itself where it has them."""
    return values.float().contiguous()
