"""Kernels that start before the one in front of them has ended (programmatic dependent launch,
Hopper and later).

A kernel launched with ``**launch(device, rows)`` may be placed before the kernel in front has
ended. Until ``enter`` returns it may touch only what no kernel of the step writes: weights, page
tables, lengths. A matrix product has its first weights on their way by then, so the memory stays
busy while a norm or an attention computes. Every program calls ``enter`` before it returns: a
kernel's end then implies the end of all kernels before it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelmill.ops.triton.device import supports_pdl

TRIGGER_AT_START = 1  # the next kernel is placed as soon as all programs of this one have started
TRIGGER_AFTER_WAIT = 2  # the same, but not before those in front of this one have ended


def pdl_launch_options(device: torch.device, rows: int) -> dict[str, Any]:
    """Launch options and the kernel's PDL, for ``rows`` tokens.

    With one row a step is thousands of small programs, which may fill whatever is free. With more
    rows they are fewer and larger: placed while two kernels in front are still running, they would
    crowd where the first of those ends.
    """
    if not supports_pdl(device):
        return {"PDL": 0, "launch_pdl": False}
    return {"PDL": TRIGGER_AT_START if rows == 1 else TRIGGER_AFTER_WAIT, "launch_pdl": True}


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Let the next kernel be placed where PDL says so, and wait for the results of those in
    front.
    """
    if PDL == 1:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    if PDL == 2:
        gdc_launch_dependents()
