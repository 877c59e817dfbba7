"""Attention with decomposed relative positions, one pass over the keys (Li et al. 2022,
arXiv:2112.01526).

Heads of 80 channels are multiplied as 64 and 16, so that nothing is padded to 128.

``windowed_attention``: a program holds queries of one window and one head. What positions add to a
score is, once, a product of the queries with the table of offsets, dealt out by row and column of
the key; those 14 + 14 numbers a query are then multiplied with ones in the places of the key's row
and column, as if they were more channels of the queries: the tensor cores add the positions.
Windows are never copied out of the image; a key beyond the edge is read from ``fill``. Windows over
the edge have fewer queries, and no program computes one that is not there.

``whole``: a block of keys is one row of the image. What its columns add stays in registers for all
blocks, what its row adds is one number a query, both from tables made before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.triton.device import power_of_two
from modelmill.ops.triton.pdl import pdl_launch_options, pdl_wait

LOG2E = tl.constexpr(1.4426950408889634)
AttentionLaunchConfig = tuple[
    int, int, int, int, int
]  # queries, keys, warps, stages of a program; registers a thread at most, or 0


def split_head_dim(dim: int) -> tuple[int, int]:
    """Channels of a head as two blocks, powers of two from 16: 80 → (64, 16), 64 → (64, 0)."""
    whole = power_of_two(max(dim, 16))
    if dim >= whole:
        return whole, 0
    half = whole // 2
    if half < 16:
        return 16, 0
    rest = max(16, power_of_two(dim - half))
    return (half, rest) if rest < half else (whole, 0)


def relative_attention(
    qkv: torch.Tensor, window: tuple[int, int], fill: torch.Tensor | None, rel_h: torch.Tensor,
    rel_w: torch.Tensor,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """qkv [B, H, W, 3, heads, D] → out [B, H, W, heads·D]; the rest as ``ops.image_attention``."""
    rel_h, rel_w = rel_h.to(qkv.dtype).contiguous(), rel_w.to(qkv.dtype).contiguous()
    if (
        window == (qkv.shape[1], qkv.shape[2])
        and window[1] in (16, 32, 64, 128)
        and window[0] >= 16
    ):
        global_attention(qkv, rel_h, rel_w, out)
    else:
        windowed_attention(qkv, window, fill, rel_h, rel_w, out)


def windowed_attention(
    qkv: torch.Tensor, window: tuple[int, int], fill: torch.Tensor | None, rel_h: torch.Tensor,
    rel_w: torch.Tensor,
    out: torch.Tensor, config: AttentionLaunchConfig | None = None,
) -> None:  # fmt: skip
    """qkv [B, H, W, 3, heads, D] → out [B, H, W, heads·D]; rel_h, rel_w [2·S − 1, D] of qkv's
    dtype, S the window's height and width."""
    batch, height, width, _, heads, dim = qkv.shape
    tall, wide = window
    tokens = tall * wide
    rows, columns = -(-height // tall), -(-width // wide)
    block_m, block_n, warps, stages, registers = config or _windowed_config(tokens, qkv)
    main, rest = split_head_dim(dim)
    left = tokens % block_n
    outside = qkv if fill is None else fill
    grid = (-(-tokens // block_m), heads, batch * rows * columns)
    _windowed_kernel[grid](
        qkv, outside, rel_h, rel_w, out, dim**-0.5, height, width, rows, columns, *qkv.stride()[:5],
        HEADS=heads, DIM=dim, TALL=tall, WIDE=wide, PADDED=fill is not None, MAIN=main, REST=rest,
        BLOCK_M=block_m, BLOCK_N=block_n, TAIL=0 if left == 0 else max(16, power_of_two(left)),
        num_warps=warps, num_stages=stages, maxnreg=registers or None,
        **pdl_launch_options(qkv.device, batch * height * width),
    )  # fmt: skip


def _windowed_config(tokens: int, qkv: torch.Tensor) -> AttentionLaunchConfig:
    if qkv.dtype == torch.float32:
        return 16, 16, 4, 1, 0
    # with 128 registers a fourth program fits on a multiprocessor: 48 to 44 µs for ViT-H
    return (64, 64, 4, 2, 128) if tokens > 64 else (64, 32, 4, 1, 0)


@triton.constexpr_function
def _padded(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


@triton.jit(do_not_specialize=["height", "width", "rows", "columns"])
def _windowed_kernel(
    qkv_ptr, fill_ptr, rel_h_ptr, rel_w_ptr, out_ptr, scale,
    height, width, rows, columns, batch_stride, y_stride, x_stride, part_stride, head_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
    PADDED: tl.constexpr,
    MAIN: tl.constexpr, REST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TAIL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    tile = tl.program_id(2)
    batch = tile // (rows * columns)
    top = (tile // columns) % rows * TALL
    left = tile % columns * WIDE
    # queries are counted inside the image only
    across = tl.minimum(WIDE, width - left)
    queries = tl.minimum(TALL, height - top) * across
    pdl_wait(PDL)
    first = tl.program_id(0) * BLOCK_M
    if first < queries:
        query = first + tl.arange(0, BLOCK_M)
        there = query < queries
        qy, qx = query // across, query % across
        base = qkv_ptr + batch * batch_stride + head * head_stride
        at = (top + qy) * y_stride + (left + qx) * x_stride
        q, q_rest = _load_rows(base + at, there, DIM, MAIN, REST)
        by_row = _relative_offsets(q, q_rest, rel_h_ptr, qy, scale, TALL, DIM, MAIN, REST)
        by_column = _relative_offsets(q, q_rest, rel_w_ptr, qx, scale, WIDE, DIM, MAIN, REST)

        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        mass = tl.zeros([BLOCK_M], tl.float32)
        mixed = tl.zeros([BLOCK_M, MAIN], tl.float32)
        mixed_rest = tl.zeros([BLOCK_M, max(REST, 16)], tl.float32)
        whole: tl.constexpr = TALL * WIDE // BLOCK_N * BLOCK_N
        outside = fill_ptr + HEADS * DIM + head * DIM
        for start in range(0, whole, BLOCK_N):
            best, mass, mixed, mixed_rest = _attend_key_block(
                q, q_rest, by_row, by_column, best, mass, mixed, mixed_rest, start,
                base + part_stride, outside,
                top, left, height, width, y_stride, x_stride, part_stride, scale,
                HEADS, DIM, TALL, WIDE, PADDED, MAIN, REST, BLOCK_N, False,
            )  # fmt: skip
        if TAIL:
            best, mass, mixed, mixed_rest = _attend_key_block(
                q, q_rest, by_row, by_column, best, mass, mixed, mixed_rest, whole,
                base + part_stride, outside,
                top, left, height, width, y_stride, x_stride, part_stride, scale,
                HEADS, DIM, TALL, WIDE, PADDED, MAIN, REST, TAIL, True,
            )  # fmt: skip
        place = ((batch * height + top + qy) * width + left + qx) * HEADS + head
        _store(out_ptr + place * DIM, there, mixed, mixed_rest, mass, DIM, MAIN, REST)


@triton.jit
def _load_rows(at, there, DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr):
    """Rows of DIM channels as [N, MAIN] and [N, REST]; zeros where they are not there, or channels
    end.
    """
    channel = tl.arange(0, MAIN)
    spare = MAIN + tl.arange(0, max(REST, 16))
    main = tl.load(at[:, None] + channel, mask=there[:, None] & (channel < DIM), other=0.0)
    rest = main
    if REST:
        rest = tl.load(at[:, None] + spare, mask=there[:, None] & (spare < DIM), other=0.0)
    return main, rest


@triton.jit
def _relative_offsets(
    q, q_rest, table_ptr, at, scale, SIDE: tl.constexpr, DIM: tl.constexpr, MAIN: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """What each row (or column) of keys adds to a query's scores, before they are scaled: [M, SIDE]
    of q's dtype.
    """
    offsets: tl.constexpr = _padded(2 * SIDE - 1)
    offset = tl.arange(0, offsets)
    table, table_rest = _load_rows(table_ptr + offset * DIM, offset < 2 * SIDE - 1, DIM, MAIN, REST)
    found = tl.dot(q, tl.trans(table), input_precision="ieee")
    if REST:
        found = tl.dot(q_rest, tl.trans(table_rest), found, input_precision="ieee")
    place = tl.arange(0, _padded(SIDE))
    index = at[:, None] - place[None, :] + (SIDE - 1)
    return tl.gather(found * (1.0 / scale), tl.minimum(tl.maximum(index, 0), offsets - 1), 1).to(
        q.dtype
    )


@triton.jit
def _attend_key_block(
    q, q_rest, by_row, by_column, best, mass, mixed, mixed_rest, start, k_ptr, outside,
    top, left, height, width, y_stride, x_stride, part_stride, scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
    PADDED: tl.constexpr,
    MAIN: tl.constexpr, REST: tl.constexpr, BLOCK: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """One block of keys of a window."""
    key = start + tl.arange(0, BLOCK)
    ky, kx = key // WIDE, key % WIDE
    real = key < TALL * WIDE
    k_at = k_ptr + (top + ky) * y_stride + (left + kx) * x_stride
    v_at = k_at + part_stride
    if PADDED:
        inside = (top + ky < height) & (left + kx < width)
        k_at = tl.where(inside, k_at, outside)
        v_at = tl.where(inside, v_at, outside + HEADS * DIM)
    k, k_rest = _load_rows(k_at, real, DIM, MAIN, REST)
    row, column = tl.arange(0, _padded(TALL)), tl.arange(0, _padded(WIDE))
    score = tl.dot(q, tl.trans(k), input_precision="ieee")
    if REST:
        score = tl.dot(q_rest, tl.trans(k_rest), score, input_precision="ieee")
    score = tl.dot(by_row, (row[:, None] == ky[None, :]).to(q.dtype), score, input_precision="ieee")
    score = tl.dot(
        by_column, (column[:, None] == kx[None, :]).to(q.dtype), score, input_precision="ieee"
    )
    score *= scale * LOG2E
    if LAST:
        score = tl.where(real[None, :], score, float("-inf"))
    new = tl.maximum(best, tl.max(score, 1))
    weight = tl.exp2(score - new[:, None])
    keep = tl.exp2(best - new)
    mass = mass * keep + tl.sum(weight, 1)
    v, v_rest = _load_rows(v_at, real, DIM, MAIN, REST)
    weight = weight.to(v.dtype)
    mixed = tl.dot(weight, v, mixed * keep[:, None], input_precision="ieee")
    if REST:
        mixed_rest = tl.dot(weight, v_rest, mixed_rest * keep[:, None], input_precision="ieee")
    return new, mass, mixed, mixed_rest


@triton.jit
def _store(
    at, there, mixed, mixed_rest, mass, DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr
):
    channel = tl.arange(0, MAIN)
    spare = MAIN + tl.arange(0, max(REST, 16))
    dtype: tl.constexpr = at.dtype.element_ty
    tl.store(
        at[:, None] + channel,
        (mixed / mass[:, None]).to(dtype),
        mask=there[:, None] & (channel < DIM),
    )
    if REST:
        tl.store(
            at[:, None] + spare,
            (mixed_rest / mass[:, None]).to(dtype),
            mask=there[:, None] & (spare < DIM),
        )


def global_attention(
    qkv: torch.Tensor,
    rel_h: torch.Tensor,
    rel_w: torch.Tensor,
    out: torch.Tensor,
    config: AttentionLaunchConfig | None = None,
) -> None:
    """The same without windows, for images whose width is a power of two from 16 to 128."""
    batch, height, width, _, heads, dim = qkv.shape
    by_row, by_column = relative_score_tables(qkv, rel_h, rel_w)
    block_m, _, warps, stages, registers = config or _global_config(qkv)
    main, rest = split_head_dim(dim)
    grid = (-(-(height * width) // block_m), heads, batch)
    _global_kernel[grid](
        qkv, by_row, by_column, out, dim**-0.5, *qkv.stride()[:5],
        HEADS=heads, DIM=dim, TALL=height, WIDE=width, MAIN=main, REST=rest, BLOCK_M=block_m,
        num_warps=warps, num_stages=stages, maxnreg=registers or None,
        **pdl_launch_options(qkv.device, batch * height * width),
    )  # fmt: skip


def _global_config(qkv: torch.Tensor) -> AttentionLaunchConfig:
    return (16, 0, 4, 1, 0) if qkv.dtype == torch.float32 else (64, 0, 4, 3, 0)


@triton.jit
def _global_kernel(
    qkv_ptr, row_ptr, column_ptr, out_ptr, scale, batch_stride, y_stride, x_stride, part_stride,
    head_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
    MAIN: tl.constexpr, REST: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    batch = tl.program_id(2)
    query = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = query < TALL * WIDE
    base = qkv_ptr + batch * batch_stride + head * head_stride
    pdl_wait(PDL)
    q, q_rest = _load_rows(
        base + query // WIDE * y_stride + query % WIDE * x_stride, there, DIM, MAIN, REST
    )
    across = tl.arange(0, WIDE)
    place = (batch * TALL * WIDE + query) * HEADS + head
    beside = tl.load(
        column_ptr + place[:, None] * WIDE + across, mask=there[:, None], other=0.0
    ).to(tl.float32)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, MAIN], tl.float32)
    mixed_rest = tl.zeros([BLOCK_M, max(REST, 16)], tl.float32)
    every = across >= 0
    key_at = base + part_stride + across * x_stride
    for ky in range(0, TALL):
        k, k_rest = _load_rows(key_at + ky * y_stride, every, DIM, MAIN, REST)
        above = tl.load(row_ptr + place * TALL + ky, mask=there, other=0.0).to(tl.float32)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST:
            score = tl.dot(q_rest, tl.trans(k_rest), score, input_precision="ieee")
        score = score * (scale * LOG2E) + beside
        # what the row of keys adds is the same for all of them
        new = tl.maximum(best, tl.max(score, 1) + above)
        weight = tl.exp2(score - (new - above)[:, None])
        keep = tl.exp2(best - new)
        mass = mass * keep + tl.sum(weight, 1)
        v, v_rest = _load_rows(key_at + ky * y_stride + part_stride, every, DIM, MAIN, REST)
        weight = weight.to(v.dtype)
        mixed = tl.dot(weight, v, mixed * keep[:, None], input_precision="ieee")
        if REST:
            mixed_rest = tl.dot(weight, v_rest, mixed_rest * keep[:, None], input_precision="ieee")
        best = new
    _store(out_ptr + place * DIM, there, mixed, mixed_rest, mass, DIM, MAIN, REST)


def relative_score_tables(
    qkv: torch.Tensor, rel_h: torch.Tensor, rel_w: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q · rel_h[yq − yk + H − 1] and q · rel_w[xq − xk + W − 1], times log2 e: [B, H, W, heads, H]
    and […, W].
    """
    batch, height, width, _, heads, dim = qkv.shape
    by_row = torch.empty((batch, height, width, heads, height), dtype=qkv.dtype, device=qkv.device)
    by_column = torch.empty(
        (batch, height, width, heads, width), dtype=qkv.dtype, device=qkv.device
    )
    main, rest = split_head_dim(dim)
    batch_stride, y_stride, x_stride, _, head_stride = qkv.stride()[:5]
    # a program: all queries of one row with all rows, or of one column with all columns
    for table, target, lines, long, line_stride, step in (
        (rel_h, by_row, height, width, y_stride, x_stride),
        (rel_w, by_column, width, height, x_stride, y_stride),
    ):
        vertical = target is by_row
        block, places = max(16, power_of_two(long)), max(16, power_of_two(lines))
        if qkv.dtype == torch.float32:
            block = min(block, 32)
        _score_table_kernel[(lines * -(-long // block), heads, batch)](
            qkv, table, target, lines, long, batch_stride, line_stride, step, head_stride,
            width if vertical else 1, 1 if vertical else width,
            HEADS=heads, DIM=dim, MAIN=main, REST=rest, BLOCK=block, PLACES=places, num_warps=4,
            **pdl_launch_options(qkv.device, batch * height * width),
        )  # fmt: skip
    return by_row, by_column


@triton.jit(do_not_specialize=["lines", "long"])
def _score_table_kernel(
    qkv_ptr, table_ptr, out_ptr, lines, long, batch_stride, line_stride, step, head_stride,
    line_tokens, step_tokens,
    HEADS: tl.constexpr, DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    BLOCK: tl.constexpr, PLACES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0) % lines
    head = tl.program_id(1)
    batch = tl.program_id(2)
    along = tl.program_id(0) // lines * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, PLACES)
    table, table_rest = _load_rows(
        table_ptr + (line - place + lines - 1) * DIM, place < lines, DIM, MAIN, REST
    )
    pdl_wait(PDL)
    at = qkv_ptr + batch * batch_stride + head * head_stride + line * line_stride + along * step
    q, q_rest = _load_rows(at, along < long, DIM, MAIN, REST)
    found = tl.dot(q, tl.trans(table), input_precision="ieee")
    if REST:
        found = tl.dot(q_rest, tl.trans(table_rest), found, input_precision="ieee")
    found = found * LOG2E
    token = (batch * lines * long + line * line_tokens + along * step_tokens) * HEADS + head
    inside = (along < long)[:, None] & (place < lines)[None, :]
    tl.store(
        out_ptr + token[:, None] * lines + place, found.to(out_ptr.dtype.element_ty), mask=inside
    )
