"""The sequences of a step as the C++ kernels of recurrences take them (state_rows.h)."""

from __future__ import annotations

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.gated_delta_rule import GatedDeltaInputs
from modelmill.ops.recurrent_metadata import has_contiguous_operands
from modelmill.ops.ssd_scan import SSDScanInputs

METADATA_POINTERS_SIGNATURE = "ppppp"
"""Argument types of ``metadata_pointers`` in a kernel's signature (``build.load_function``)."""


def metadata_pointers(rows: tuple[torch.Tensor | int, ...]) -> tuple[int, ...]:
    """Addresses of first tokens, positions, slots and snapshots of a ``RecurrentStepMetadata``."""
    return tuple(each.data_ptr() for each in rows[:5] if isinstance(each, torch.Tensor))


def has_contiguous_metadata(rows: tuple[torch.Tensor | int, ...]) -> bool:
    """Whether the metadata's tensors have the kernels' dtypes and lie together."""
    dtypes = (torch.int32, *(torch.int64,) * 4)
    return all(
        isinstance(each, torch.Tensor) and each.dtype is dtype and each.is_contiguous()
        for each, dtype in zip(rows, dtypes, strict=False)
    )


def supports_recurrence(inputs: GatedDeltaInputs | SSDScanInputs) -> bool:
    """Whether tokens and gates have the kernels' dtypes, and rows and states lie together."""
    tokens, gates = inputs[:2]
    return (
        tokens.dtype in build.DTYPE_CODES
        and gates.dtype is torch.float32
        and has_contiguous_operands(tokens, gates, inputs.state)
        and has_contiguous_metadata(inputs.rows)
    )


def to_contiguous_float32(values: torch.Tensor) -> torch.Tensor:
    """Packed float32 values; the tensor itself where it has them."""
    return values.float().contiguous()
