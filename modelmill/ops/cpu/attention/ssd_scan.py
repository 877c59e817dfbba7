"""Mamba2's state space recurrence in C++ (ssd_scan.cpp)."""

from __future__ import annotations

import torch

from modelmill.ops.cpu.attention import recurrent_metadata
from modelmill.ops.cpu.common import build
from modelmill.ops.ssd_scan import SSDScanInputs

unavailable_reason, supports = build.unavailable_reason, recurrent_metadata.supports_recurrence
_kernel = build.make_lazy_loader_by_gil_mode(
    "ssd_scan", "p" * 7 + recurrent_metadata.METADATA_POINTERS_SIGNATURE + "q" * 8 + "ddi"
)


def run(inputs: SSDScanInputs) -> torch.Tensor:
    """As the reference, all tokens one by one."""
    xbc, dt, *by_head, limit, state, rows = inputs
    _, heads, dim, size = state.shape
    a_log, dt_bias, skip = (recurrent_metadata.to_contiguous_float32(each) for each in by_head)
    make = torch.empty if rows.is_decode else torch.zeros  # a prompt may be padded
    out = make(len(xbc), heads * dim)
    _kernel(len(xbc) > build.SMALL_M_LIMIT)(
        out.data_ptr(), xbc.data_ptr(), dt.data_ptr(), a_log.data_ptr(), dt_bias.data_ptr(),
        skip.data_ptr(), state.data_ptr(),
        *recurrent_metadata.metadata_pointers(rows), len(rows.slots),
        len(xbc), heads, (xbc.shape[1] - heads * dim) // (2 * size), dim, size, xbc.stride(0),
        state.stride(0), *limit, build.DTYPE_CODES[xbc.dtype],
    )  # fmt: skip
    return out
