"""Norms whose 8-bit values come out in another order of columns: norm_order.cu for many rows, norm_row.cu for few."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from modelmill.ops.cuda import launch

TYPES = {torch.bfloat16: (), torch.float16: ("HALF",)}
WIDEST = 8192
LEAST_ROWS = 256  # with fewer, what is kept of each column is not used often enough

SHARED = 226 * 1024  # bytes of a multiprocessor
MOST_STAGES = 2

PerColumn = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def fits(x: torch.Tensor, weight: torch.Tensor, kind: torch.dtype, per_column: PerColumn) -> bool:
    """Rows in 16 bits, of x and of the values a multiple of 16 columns up to 8,192, with an order."""
    factor, zero, order = per_column
    if order is None or not x.is_cuda or x.dtype not in TYPES or x.dtype != weight.dtype or x.dim() < 2:
        return False
    width, columns = x.shape[-1], order.numel()
    if width % 16 or columns % 16 or max(width, columns) > WIDEST or x.numel() == 0:
        return False
    types = zip((factor, zero, order), (torch.float32, torch.int32, torch.int32), strict=True)
    packed = all(t is None or (t.dtype is each and t.is_contiguous() and t.data_ptr() % 16 == 0) for t, each in types)
    return (
        packed
        and weight.data_ptr() % 16 == 0
        and x.is_contiguous()
        and x.data_ptr() % 16 == 0
        and kind in (torch.int8, torch.float8_e4m3fn)
    )


@dataclass(frozen=True)
class Form:
    """How the kernel is cut: threads a block, blocks a multiprocessor, groups of rows
    that are brought ahead, bytes of shared memory."""

    threads: int
    blocks: int
    stages: int
    shared: int


def cut(width: int, columns: int, rows: int, stages: int = 1, busy: int = 1024) -> Form:
    """For groups of so many rows of ``width`` 16-bit values (with a residual, twice as many).

    stages: groups ahead at most; busy: threads that a multiprocessor has room for, or is best left with.
    """
    threads = -(-max(width, columns) // 256) * 32
    exchange, stage, static = 4 * width + 16, 2 * width * rows, 2048  # static: sums and barriers, and the system's own
    blocks = max(1, min(busy // threads, 8, SHARED // (stage + exchange + static)))
    stages = max(1, min(stages, (SHARED // blocks - exchange - static) // stage))
    return Form(threads, blocks, stages, exchange + stages * stage)


def norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    kind: torch.dtype,
    per_column: PerColumn,
    bits: int,
    form: Form | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(values, scale or None); the sum is written over the residual. form: how the kernel is cut, else ``cut``'s."""
    factor, zero, order = per_column
    assert order is not None
    width, columns, rows = x.shape[-1], order.numel(), x.numel() // x.shape[-1]
    values = torch.empty((*x.shape[:-1], columns), dtype=kind, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) if factor is None else None
    each = factor is not None and factor.numel() > 1
    macros = [f"WIDTH={width}", f"COLUMNS={columns}", f"ADD={int(residual is not None)}"]
    macros += [f"TOKEN={int(factor is None)}", f"EACH={int(each)}", f"SHIFT={int(zero is not None)}"]
    macros += [*TYPES[x.dtype], *(() if kind is torch.int8 else ("FP8",))]
    most = 448.0 if kind is not torch.int8 else float(2 ** (bits - 1) - 1)
    device, pointers = x.get_device(), launch.addresses(x, weight, residual, values, scale, factor, zero, order)
    with torch.cuda.device(x.device):
        if rows < LEAST_ROWS and form is None:
            threads = -(-max(width, columns) // 256) * 32
            macros.append(f"ALONE={int(rows == 1)}")
            kernel = launch.kernel("norm_row", "norm_row", tuple(macros), threads, 0, device)
            kernel.launch(rows, struct.pack("=8Q2f", *pointers, eps, most), early=True)
            return values, scale
        together = 2 if each or zero is not None else 4
        # two rows in 16 bits are sooner done than brought, four in bytes the other way round
        form = form or cut(
            width,
            columns,
            together if residual is None else 2 * together,
            stages=2 if together == 2 else 1,
            busy=1024 if residual is None else 512,
        )
        macros += [f"BLOCKS={form.blocks}", f"STAGES={form.stages}"]
        kernel = launch.kernel("norm_order", "norm_order", tuple(macros), form.threads, form.shared, device)
        blocks = min(-(-rows // together), form.blocks * launch.multiprocessors(device))
        kernel.launch(blocks, struct.pack("=8Qq2f", *pointers, rows, eps, most), early=True)
    return values, scale
