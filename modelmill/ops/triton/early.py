"""Kernels that start before the one in front of them has ended (programmatic dependent launch, Hopper and later).

A kernel launched with ``**launch(device, rows)`` may be placed before the kernel in front has ended. Until ``enter``
returns it may touch only what no kernel of the step writes: weights, page tables, lengths. A matrix product has its
first weights on their way by then, so the memory stays busy while a norm or an attention computes. Every program calls
``enter`` before it returns: a kernel's end then implies the end of all kernels before it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelmill.ops.triton.device import early_launch

WAIT = 1  # placed early itself, the next kernel only at its end
INVITE = 2  # the next kernel is placed as soon as all programs of this one have started

# With one row a step is thousands of small programs, which fill whatever is free. With more rows they are fewer and
# larger, and placed early they would crowd on the multiprocessors that happen to be free first.
_INVITING_ROWS = 1


def launch(device: torch.device, rows: int) -> dict[str, Any]:
    """Launch options and the kernel's EARLY, for ``rows`` tokens."""
    if not early_launch(device):
        return {"EARLY": 0, "launch_pdl": False}
    return {"EARLY": INVITE if rows <= _INVITING_ROWS else WAIT, "launch_pdl": True}


@triton.jit
def enter(EARLY: tl.constexpr):
    """Let the next kernel be placed where EARLY says so, and wait for the results of those in front."""
    if EARLY == 2:
        gdc_launch_dependents()
    if EARLY:
        gdc_wait()
