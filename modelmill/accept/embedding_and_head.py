"""Compares embedding tables and a quantized head with the checkpoint's.

A text uses few rows of an embedding, and a reference that computes with the engine's own head
cannot reveal a wrong head. Both are as large as the vocabulary: one block of rows is in memory at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from modelmill.accept.error_metrics import ErrorMetrics, incomparable_metrics
from modelmill.accept.reference import ReferenceModel
from modelmill.accept.reference.tensor_source import BLOCK_ROWS
from modelmill.accept.row_and_tile_errors import compare_matrix_row_blocks
from modelmill.accept.tolerance_check_result import ToleranceCheckResult
from modelmill.accept.tolerances import module_bound, weight_bound, worst_block_bound


def check_embedding_tables(
    checkpoint_reference: ReferenceModel, model: Any, dtype: str
) -> Iterator[ToleranceCheckResult]:
    """Check the embedding tables, whole and row by row; no recipe quantizes them."""
    bound = module_bound("embedding", dtype)
    tables = {f"embed.{n}": s for n, s in checkpoint_reference.embedding_table_names().items()}
    for path, source in (tables | checkpoint_reference.extra_embedding_table_names()).items():
        module, _, leaf = path.rpartition(".")
        table = getattr(model.get_submodule(module) if "." in module else model.embed, leaf)
        for row in _compare_matrix_by_row_blocks(
            path,
            checkpoint_reference,
            source,
            tuple(table.shape),
            partial(_slice_table_rows, table),
        ):
            yield ToleranceCheckResult(row.name, None, module, row, bound)


def check_quantized_head(
    checkpoint_reference: ReferenceModel, model: Any, weight_formats: Mapping[str, str], dtype: str
) -> Iterator[ToleranceCheckResult]:
    """Check a quantized head: the whole, its worst row and tile."""
    weight_format = weight_formats.get("head", "dense")
    if weight_format == "dense":
        return
    weight = model.head.weight
    rows = _compare_matrix_by_row_blocks(
        "head.weight",
        checkpoint_reference,
        checkpoint_reference.head_weight_name(),
        weight.shape,
        partial(_dequantize_rows, weight, checkpoint_reference.device),
    )
    whole = weight_bound(dtype, weight_format)
    for row, bound in zip(rows, (whole, worst_block_bound(weight_format) or whole), strict=True):
        yield ToleranceCheckResult(row.name, None, "head", row, bound)


def dequantize_row_blocks(weight: Any, device: torch.device) -> Iterator[Tensor]:
    """Yield a weight [N, K] on a device in float32, some of its rows at a time."""
    for start in range(0, weight.shape[0], BLOCK_ROWS):
        yield _dequantize_rows(weight, device, start, min(start + BLOCK_ROWS, weight.shape[0]))


def _dequantize_rows(weight: Any, device: torch.device, start: int, stop: int) -> Tensor:
    return weight.slice([(start, stop)], (0, weight.shape[1])).to(str(device)).dequantize()


def _slice_table_rows(table: Tensor, start: int, stop: int) -> Tensor:
    return table[start:stop]


def _compare_matrix_by_row_blocks(
    name: str,
    checkpoint_reference: ReferenceModel,
    source: str,
    shape: tuple[int, ...],
    get_rows: Callable[[int, int], Tensor],
) -> tuple[ErrorMetrics, ErrorMetrics]:
    """Compare two matrices by blocks of rows.

    get_rows: returns the engine's rows from one index to another.
    """
    if shape != checkpoint_reference.source.shape(source):
        return incomparable_metrics(name), incomparable_metrics(f"{name}.worst_block")

    def blocks() -> Iterator[tuple[Tensor, Tensor]]:
        start = 0
        for expected in checkpoint_reference.source.row_blocks(source):
            yield get_rows(start, start + len(expected)), expected
            start += len(expected)

    return compare_matrix_row_blocks(name, blocks())
