"""Norms of many rows whose 8-bit values come out in another order of columns (norm_order.cu)."""

from __future__ import annotations

import struct

import torch

from modelmill.ops.cuda import launch

TYPES = {torch.bfloat16: (), torch.float16: ("HALF",)}
WIDEST = 8192
LEAST_ROWS = 256  # with fewer, what is kept of each column is not used often enough

PerColumn = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def fits(x: torch.Tensor, weight: torch.Tensor, kind: torch.dtype, per_column: PerColumn) -> bool:
    """Many rows in 16 bits, of x and of the values a multiple of 16 columns up to 8,192, with an order."""
    factor, zero, order = per_column
    if order is None or not x.is_cuda or x.dtype not in TYPES or x.dtype != weight.dtype or x.dim() < 2:
        return False
    width, columns = x.shape[-1], order.numel()
    if width % 16 or columns % 16 or max(width, columns) > WIDEST or x.numel() // width < LEAST_ROWS:
        return False
    types = zip((factor, zero, order), (torch.float32, torch.int32, torch.int32), strict=True)
    packed = all(t is None or (t.dtype is each and t.is_contiguous()) for t, each in types)
    return packed and x.is_contiguous() and x.data_ptr() % 16 == 0 and kind in (torch.int8, torch.float8_e4m3fn)


def norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    kind: torch.dtype,
    per_column: PerColumn,
    bits: int,
    blocks: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(values, scale or None); the sum is written over the residual. blocks: of a multiprocessor."""
    factor, zero, order = per_column
    assert order is not None
    width, columns, rows = x.shape[-1], order.numel(), x.numel() // x.shape[-1]
    values = torch.empty((*x.shape[:-1], columns), dtype=kind, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) if factor is None else None
    each = factor is not None and factor.numel() > 1
    macros = [f"WIDTH={width}", f"COLUMNS={columns}", f"ADD={int(residual is not None)}"]
    macros += [f"TOKEN={int(factor is None)}", f"EACH={int(each)}", f"SHIFT={int(zero is not None)}"]
    # more blocks than these would spill; what a thread keeps of its columns takes registers
    blocks = blocks or (4 if residual is None and not each else 2)
    macros += [f"BLOCKS={blocks}", *TYPES[x.dtype], *(() if kind is torch.int8 else ("FP8",))]
    threads = -(-max(width, columns) // 512) * 32
    most = 448.0 if kind is not torch.int8 else float(2 ** (bits - 1) - 1)
    device = x.get_device()
    with torch.cuda.device(x.device):
        kernel = launch.kernel("norm_order", "norm_order", tuple(macros), threads, 0, device)
        pointers = launch.addresses(x, weight, residual, values, scale, factor, zero, order)
        work = struct.pack("=8Q3q2f", *pointers, rows, width // 8, width // 8, eps, most)
        kernel.launch(min(rows, blocks * launch.multiprocessors(device)), work, early=True)
    return values, scale
