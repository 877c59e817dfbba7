"""What stands before and behind the layers, against the checkpoint's: embedding tables, and a head that is quantized.

A text shows few rows of an embedding, and a reference that computes with the engine's own head shows nothing of it.
Both are as large as the vocabulary: one block of rows is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from modelmill.accept.finding import Finding
from modelmill.accept.metrics import Row, incomparable
from modelmill.accept.parts import compare_blocks
from modelmill.accept.reference import Reference
from modelmill.accept.reference.source import BLOCK_ROWS
from modelmill.accept.tolerances import PARTS, module_bound, weight_bound


def table_findings(true: Reference, model: Any, dtype: str) -> Iterator[Finding]:
    """The stored tables of the embedding, whole and row by row: neither rounding nor a recipe changes them."""
    bound = module_bound("embed", dtype)
    for suffix, source in true.tables().items():
        table = getattr(model.embed, suffix)
        for row in _compared(f"embed.{suffix}", true, source, tuple(table.shape), partial(_rows, table)):
            yield Finding(row.name, None, "embed", row, bound)


def head_findings(true: Reference, model: Any, kinds: Mapping[str, str], dtype: str) -> Iterator[Finding]:
    """What a quantized head holds: the whole of it, its worst row and tile."""
    kind = kinds.get("head", "dense")
    if kind == "dense":
        return
    held = model.head.held
    rows = _compared("head.weight", true, true.head_weight_name(), held.shape, partial(_dense, held, true.device))
    for row, bound in zip(rows, (weight_bound(dtype, kind), PARTS[kind]), strict=True):
        yield Finding(row.name, None, "head", row, bound)


def dense_blocks(held: Any, device: torch.device) -> Iterator[Tensor]:
    """A held weight [N, K] on a device in float32, some of its rows at a time."""
    for start in range(0, held.shape[0], BLOCK_ROWS):
        yield _dense(held, device, start, min(start + BLOCK_ROWS, held.shape[0]))


def _dense(held: Any, device: torch.device, start: int, stop: int) -> Tensor:
    return held.slice([(start, stop)], (0, held.shape[1])).to(str(device)).dense()


def _rows(table: Tensor, start: int, stop: int) -> Tensor:
    return table[start:stop]


def _compared(
    name: str, true: Reference, source: str, shape: tuple[int, ...], rows: Callable[[int, int], Tensor]
) -> tuple[Row, Row]:
    """rows: ours from one row to another."""
    if shape != true.source.shape(source):
        return incomparable(name), incomparable(f"{name}.parts")

    def blocks() -> Iterator[tuple[Tensor, Tensor]]:
        start = 0
        for expected in true.source.row_blocks(source):
            yield rows(start, start + len(expected)), expected
            start += len(expected)

    return compare_blocks(name, blocks())
