"""Meeting every form of a kernel before a request does: Triton compiles each of them when it is first met.

A decode step by graph has few forms, since sizes are rounded up there. A step with prompts beside answers is no graph:
into how many parts attention divides the contexts follows from how many answers run and how long they are, and each
number of parts is a kernel of its own. Compiled while people read along, it stops all of them for a part of a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from modelmill.ops import shelf
from modelmill.ops.shelf import Ops


class Seen:
    """``paged_attention`` that keeps what it was called with: one call of each kind of layer."""

    def __init__(self, run: Callable[..., torch.Tensor]) -> None:
        self._run = run
        self.calls: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
        """As the op. rest: tables, starts, lengths, bounds of queries and contexts; scale, window and scales."""
        scale, window, *scales = (*rest[5:], None, None, None)[:4]
        kind = (q.shape[1:], q.dtype, k.shape[1:], k.dtype, window)
        self.calls.setdefault(kind, (q, k, v, scale, window, *scales))
        return self._run(q, k, v, *rest)


@torch.inference_mode()
def attention(ops: Ops, seen: Seen, most: int, longest: int, columns: int) -> int:
    """Call attention once for every form that single queries may take; how many there were.

    The sequences are empty: nothing is read or stored. most, longest: sequences of a step, tokens of one. columns: of
    their page tables. Other ranks find what this one compiled where Triton keeps it on the disk.
    """
    count = 0
    for q, k, v, scale, *rest in seen.calls.values():
        starts = torch.arange(most + 1, dtype=torch.int32, device=q.device)
        empty = torch.zeros((most, columns), dtype=torch.int32, device=q.device)
        queries = q.new_zeros((most, *q.shape[1:]))
        for forms in shelf.forms("paged_attention", ops.chosen["paged_attention"]):
            for batch, context in forms(q, k, most, longest, rest[0]):
                where = (empty[:batch], starts[: batch + 1], torch.zeros_like(starts[:batch]))
                ops.paged_attention(queries[:batch], k, v, *where, 1, context, scale, *rest)
                count += 1
    return count
