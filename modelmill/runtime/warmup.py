"""Meeting every form of a kernel before a request does: each of them is compiled when it is first
met.

A decode step by graph has few forms, since sizes are rounded up there. A step with prompts beside
answers is no graph: into how many parts attention divides the contexts follows from how many
answers run and how long they are, how a product is cut into tiles from how many tokens there are,
and each is a kernel of its own. Compiled while people read along, it stops all of them for a part
of a second, or for two.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from modelmill.core import log
from modelmill.core.quoting import one_line
from modelmill.ops import registry
from modelmill.ops.registry import Ops

_log = log.get_logger(__name__)
# Products whose kernel depends on how many rows there are.
GEMM_OPS = ("linear_swiglu", "w8a8_linear", "w8a8_linear_swiglu", "fp8_linear", "qkv_rope_cache")
# Which of their arguments behind the weight have a row for each of x. Of w8a8_linear and its kin
# the scales of x, where they are not one for all; of qkv_rope_cache slots, angles and factors of
# queries.
ROW_ARGUMENTS = {
    "w8a8_linear": (1,),
    "w8a8_linear_swiglu": (1,),
    "fp8_linear": (1,),
    "qkv_rope_cache": (3, 5, 6, 7),
}


class AttentionRecorder:
    """``paged_attention`` that keeps what it was called with: one call of each kind of layer."""

    def __init__(self, run: Callable[..., torch.Tensor]) -> None:
        self._run = run
        self.calls: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
    ) -> torch.Tensor:
        """As the op.

        rest: tables, starts, lengths, bounds of queries and contexts; scale, window and scales.
        """
        scale, window, *scales = (*rest[5:], None, None, None)[:4]
        key = (q.shape[1:], q.dtype, k.shape[1:], k.dtype, window)
        self.calls.setdefault(key, (q, k, v, scale, window, *scales))
        return self._run(q, k, v, *rest)


@torch.inference_mode()
def warm_up_attention(
    ops: Ops, recorder: AttentionRecorder, max_seqs: int, max_len: int, table_columns: int
) -> int:
    """Call attention once for every form that single queries may take; how many there were.

    The sequences are empty: nothing is read or stored. max_seqs, max_len: sequences of a step,
    tokens of one. table_columns: of their page tables. Other ranks find what this one compiled
    where Triton keeps it on the disk.
    """
    count = 0
    for q, k, v, scale, *rest in recorder.calls.values():
        starts = torch.arange(max_seqs + 1, dtype=torch.int32, device=q.device)
        empty = torch.zeros((max_seqs, table_columns), dtype=torch.int32, device=q.device)
        queries = q.new_zeros((max_seqs, *q.shape[1:]))
        for forms in registry.specializations("paged_attention", ops.backends["paged_attention"]):
            for batch, context in forms(q, k, max_seqs, max_len, rest[0]):
                where = (empty[:batch], starts[: batch + 1], torch.zeros_like(starts[:batch]))
                ops.paged_attention(queries[:batch], k, v, *where, 1, context, scale, *rest)
                count += 1
    return count


class GemmRecorder:
    """A product that keeps what it was called with: one call for each kind of weight and of what
    goes with it.
    """

    def __init__(self, run: Callable[..., torch.Tensor | None]) -> None:
        self._run = run
        self.calls: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor | None:
        """As the op.

        rest: what it takes behind the weight: scales, a bias, the pages of the layer that came
        first.
        """
        key = (x.dtype, weight.shape, weight.dtype, *(each is None for each in rest))
        self.calls.setdefault(key, (x, weight, *rest))
        return self._run(x, weight, *rest)


def record_gemms(ops: Ops) -> tuple[Ops, dict[str, GemmRecorder]]:
    """``ops`` whose products keep their calls, and these by name."""
    recorders = {
        name: GemmRecorder(run) for name in GEMM_OPS if (run := getattr(ops, name)) is not None
    }
    return replace(ops, **recorders), recorders  # type: ignore[arg-type]


def warm_up_gemms(ops: Ops, recorders: Mapping[str, GemmRecorder], max_tokens: int) -> int:
    """Call each product once for every form that steps of up to ``max_tokens`` tokens may take; how
    many could be met.

    Side by side, as far as there are cores: a compiler takes 2 to 4 s for each of them. What fails
    here fails whoever needs it, and nobody else: it is logged.
    """
    jobs: list[Callable[[], object]] = []
    for name, product in recorders.items():
        for x, weight, *rest in product.calls.values():
            for forms in registry.specializations(name, ops.backends[name]):
                jobs += [
                    partial(_run_gemm, name, getattr(ops, name), x, weight, rest, rows)
                    for rows in forms(x, weight, max_tokens)
                ]
    met = 0
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), "compile") as pool:
        for done in [pool.submit(job) for job in jobs]:
            try:
                done.result()
                met += 1
            except Exception as error:
                _log.warning(
                    "a product's form could not be met beforehand: %s", one_line(str(error), 300)
                )
    return met


@torch.inference_mode()
def _run_gemm(
    name: str,
    run: Callable[..., object],
    x: torch.Tensor,
    weight: torch.Tensor,
    rest: list[Any],
    rows: int,
) -> None:
    """With so many rows of zeros for x; of what has a row for each of x ones, and slots that store
    nothing.
    """
    given = list(rest)
    for i in ROW_ARGUMENTS.get(name, ()):
        each = given[i] if i < len(given) else None
        if each is not None and each.dim() > 0 and len(each) == len(x):
            given[i] = each.new_full((rows, *each.shape[1:]), 1 if each.is_floating_point() else -1)
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        run(x.new_zeros((rows, x.shape[1])), weight, *given)
