"""The likeliest token by numpy, whose argmax is many times faster than torch's.

Computes: ids[M] of logits[M, vocab]
Dtypes: as numpy
Layout: row-major
Range: any M; rows with NaN are the reference's
Technique: numpy argmax
Ops: argmax
"""

from __future__ import annotations

import numpy as np
import torch

from modelmill.ops.argmax import argmax
from modelmill.ops.row_op_support import RowOpSupportRange

SUPPORTED_PROBLEMS = (RowOpSupportRange(),)


def unavailable_reason(device_type: str) -> str | None:
    """None on a CPU."""
    return None if device_type == "cpu" else "it runs on the CPU only"


def run(logits: torch.Tensor) -> torch.Tensor:
    """As the reference, which serves rows with NaN."""
    rows = logits.numpy()
    ids = rows.argmax(-1)
    # numpy's argmax finds a NaN where there is one
    if np.isnan(rows[np.arange(len(ids)), ids]).any():
        return argmax(logits)
    return torch.from_numpy(ids)
