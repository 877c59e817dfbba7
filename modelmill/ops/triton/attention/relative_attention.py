"""Attention with decomposed relative positions, in one pass over the keys (arXiv:2112.01526).

Computes: softmax(q · Kᵀ · scale + relative positions by row and column) · V per window or over the
    image
Dtypes: float32, bfloat16 or float16
Layout: qkv read in place, windows never copied; contiguous channels
Range: relative positions; D ≤ 128
Technique: flash attention on tensor cores, position terms as additional channels (one-hot) or from
    tables, PDL
Ops: image_attention

Heads of 80 channels are multiplied as 64 and 16 channels, so that nothing is padded to 128.

``windowed_attention``: a program holds queries of one window and one head. The position terms of a
score are computed once, as a product of the queries with the table of offsets, gathered by row and
column of the key. These 14 + 14 numbers per query are then multiplied with one-hot vectors of the
key's row and column, as if they were additional channels, so that the tensor cores add the position
terms. Windows are never copied out of the image; a key beyond the edge is read from ``fill``.
Windows at the edge have fewer queries, and no program computes queries outside the image.

``global_attention``: a block of keys is one row of the image. The terms of its columns stay in
registers for all blocks, the term of its row is one number per query; both come from precomputed
tables.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.triton.attention.online_softmax import softmax_weights
from modelmill.ops.triton.common.device import max_shared_bytes, next_power_of_two
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger

LOG2E = tl.constexpr(1.4426950408889634)
# queries, keys, warps, stages of a program; maximum registers per thread, or 0
AttentionLaunchConfig = tuple[int, int, int, int, int]
MAX_QUERIES_PER_PROGRAM = 64  # of a program
NON_TABLE_SHARED_BYTES = 32 << 10


def split_head_dim(dim: int) -> tuple[int, int]:
    """Split the channels of a head into two powers of two ≥ 16: 80 → (64, 16), 64 → (64, 0)."""
    padded = next_power_of_two(max(dim, 16))
    if dim >= padded:
        return padded, 0
    half = padded // 2
    if half < 16:
        return 16, 0
    rest = max(16, next_power_of_two(dim - half))
    return (half, rest) if rest < half else (padded, 0)


def relative_attention(
    qkv: torch.Tensor, window: tuple[int, int], fill: torch.Tensor | None, rel_h: torch.Tensor,
    rel_w: torch.Tensor,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Compute attention of qkv [B, H, W, 3, heads, D] into out [B, H, W, heads·D].

    Other arguments as in ``ops.image_attention``.
    """
    rel_h, rel_w = rel_h.to(qkv.dtype).contiguous(), rel_w.to(qkv.dtype).contiguous()
    if _is_global(qkv, window):
        global_attention(qkv, rel_h, rel_w, out)
    else:
        windowed_attention(qkv, window, fill, rel_h, rel_w, out)


def _is_global(qkv: torch.Tensor, window: tuple[int, int]) -> bool:
    whole = window == (qkv.shape[1], qkv.shape[2])
    return whole and window[1] in (16, 32, 64, 128) and window[0] >= 16


def table_fits_shared_memory(qkv: torch.Tensor, window: tuple[int, int]) -> bool:
    """Whether a window's table of offsets fits into shared memory, beside queries and keys.

    It is read from there, and its products with the queries are gathered there in float32.
    """
    if _is_global(qkv, window):
        return True
    offsets = next_power_of_two(2 * max(window) - 1)
    row_bytes = max(
        qkv.element_size() * sum(split_head_dim(qkv.shape[-1])), 4 * MAX_QUERIES_PER_PROGRAM
    )
    return offsets * row_bytes + NON_TABLE_SHARED_BYTES <= max_shared_bytes(qkv.device)


def windowed_attention(
    qkv: torch.Tensor, window: tuple[int, int], fill: torch.Tensor | None, rel_h: torch.Tensor,
    rel_w: torch.Tensor,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Compute windowed attention of qkv [B, H, W, 3, heads, D] into out [B, H, W, heads·D].

    rel_h, rel_w: [2·S − 1, D] of qkv's dtype, S the window's height and width.
    """
    batch, height, width, _, heads, dim = qkv.shape
    win_h, win_w = window
    tokens = win_h * win_w
    rows, columns = -(-height // win_h), -(-width // win_w)
    block_m, block_n, warps, stages, registers = _windowed_config(tokens, qkv)
    main, rest = split_head_dim(dim)
    tail_keys = tokens % block_n
    fill_or_dummy = qkv if fill is None else fill
    grid = (-(-tokens // block_m), heads, batch * rows * columns)
    _windowed_kernel[grid](
        qkv, fill_or_dummy, rel_h, rel_w, out, dim**-0.5, height, width, rows, columns,
        *qkv.stride()[:5],
        HEADS=heads, DIM=dim, TALL=win_h, WIDE=win_w, PADDED=fill is not None, MAIN=main, REST=rest,
        BLOCK_M=block_m, BLOCK_N=block_n,
        TAIL=0 if tail_keys == 0 else max(16, next_power_of_two(tail_keys)),
        num_warps=warps, num_stages=stages, maxnreg=registers or None,
        **pdl_launch_options(qkv.device, batch * height * width),
    )  # fmt: skip


def _windowed_config(tokens: int, qkv: torch.Tensor) -> AttentionLaunchConfig:
    if qkv.dtype == torch.float32:
        return 16, 16, 4, 1, 0
    if tokens <= 64:
        return 64, 32, 4, 1, 0
    # with 128 registers a fourth program fits on an SM: 48 to 44 µs for ViT-H; the products with
    # the offsets of a large window need more
    return 64, 64, 4, 2, 128 if tokens <= 64 * 64 else 0


@triton.constexpr_function
def _round_up_to_power_of_two(n: int) -> int:
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
    head, batch, top, left = window_of_program(rows, columns, TALL, WIDE)
    # only queries inside the image are counted
    valid_width = tl.minimum(WIDE, width - left)
    queries = tl.minimum(TALL, height - top) * valid_width
    pdl_wait_and_trigger(PDL)
    first = tl.program_id(0) * BLOCK_M
    if first < queries:
        query = first + tl.arange(0, BLOCK_M)
        query_valid = query < queries
        qy, qx = query // valid_width, query % valid_width
        base = qkv_ptr + batch * batch_stride + head * head_stride
        at = (top + qy) * y_stride + (left + qx) * x_stride
        q, q_rest = _load_rows(base + at, query_valid, DIM, MAIN, REST)
        by_row = _relative_score_terms(q, q_rest, rel_h_ptr, qy, scale, TALL, DIM, MAIN, REST)
        by_column = _relative_score_terms(q, q_rest, rel_w_ptr, qx, scale, WIDE, DIM, MAIN, REST)

        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        exp_sum = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, MAIN], tl.float32)
        acc_rest = tl.zeros([BLOCK_M, max(REST, 16)], tl.float32)
        full_keys: tl.constexpr = TALL * WIDE // BLOCK_N * BLOCK_N
        k_at, fill_at = base + part_stride, fill_ptr + HEADS * DIM + head * DIM
        for start in range(0, full_keys, BLOCK_N):
            row_max, exp_sum, acc, acc_rest = _attend_key_block(
                q, q_rest, by_row, by_column, row_max, exp_sum, acc, acc_rest, start, k_at, fill_at,
                top, left, height, width, y_stride, x_stride, part_stride, scale,
                HEADS, DIM, TALL, WIDE, PADDED, MAIN, REST, BLOCK_N, False,
            )  # fmt: skip
        if TAIL:
            row_max, exp_sum, acc, acc_rest = _attend_key_block(
                q, q_rest, by_row, by_column, row_max, exp_sum, acc, acc_rest, full_keys, k_at,
                fill_at, top, left, height, width, y_stride, x_stride, part_stride, scale,
                HEADS, DIM, TALL, WIDE, PADDED, MAIN, REST, TAIL, True,
            )  # fmt: skip
        out_row = ((batch * height + top + qy) * width + left + qx) * HEADS + head
        _normalize_and_store_output(
            out_ptr + out_row * DIM, query_valid, acc, acc_rest, exp_sum, DIM, MAIN, REST
        )


@triton.jit
def window_of_program(rows, columns, TALL: tl.constexpr, WIDE: tl.constexpr):
    """(head, image, first row, first column) of the window that a program computes."""
    tile = tl.program_id(2)
    top = (tile // columns) % rows * TALL
    return tl.program_id(1), tile // (rows * columns), top, tile % columns * WIDE


@triton.jit
def _load_rows(at, row_valid, DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr):
    """Load rows of DIM channels as [N, MAIN] and [N, REST]; zero for invalid rows and channels."""
    channel = tl.arange(0, MAIN)
    rest_channel = MAIN + tl.arange(0, max(REST, 16))
    main = tl.load(at[:, None] + channel, mask=row_valid[:, None] & (channel < DIM), other=0.0)
    rest = main
    if REST:
        rest = tl.load(
            at[:, None] + rest_channel, mask=row_valid[:, None] & (rest_channel < DIM), other=0.0
        )
    return main, rest


@triton.jit
def _relative_score_terms(
    q, q_rest, table_ptr, at, scale, SIDE: tl.constexpr, DIM: tl.constexpr, MAIN: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """Unscaled position terms of the scores per key row (or column): [M, SIDE] of q's dtype."""
    offsets: tl.constexpr = _round_up_to_power_of_two(2 * SIDE - 1)
    offset = tl.arange(0, offsets)
    table, table_rest = _load_rows(table_ptr + offset * DIM, offset < 2 * SIDE - 1, DIM, MAIN, REST)
    products = tl.dot(q, tl.trans(table), input_precision="ieee")
    if REST:
        products = tl.dot(q_rest, tl.trans(table_rest), products, input_precision="ieee")
    key_index = tl.arange(0, _round_up_to_power_of_two(SIDE))
    index = at[:, None] - key_index[None, :] + (SIDE - 1)
    return tl.gather(products * (1.0 / scale), tl.minimum(tl.maximum(index, 0), offsets - 1), 1).to(
        q.dtype
    )


@triton.jit
def _attend_key_block(
    q, q_rest, by_row, by_column, row_max, exp_sum, acc, acc_rest, start, k_ptr, fill_at,
    top, left, height, width, y_stride, x_stride, part_stride, scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
    PADDED: tl.constexpr,
    MAIN: tl.constexpr, REST: tl.constexpr, BLOCK: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Process one block of keys of a window."""
    key = start + tl.arange(0, BLOCK)
    ky, kx = key // WIDE, key % WIDE
    key_valid = key < TALL * WIDE
    k_at = k_ptr + (top + ky) * y_stride + (left + kx) * x_stride
    v_at = k_at + part_stride
    if PADDED:
        inside = (top + ky < height) & (left + kx < width)
        k_at = tl.where(inside, k_at, fill_at)
        v_at = tl.where(inside, v_at, fill_at + HEADS * DIM)
    k, k_rest = _load_rows(k_at, key_valid, DIM, MAIN, REST)
    row, column = (
        tl.arange(0, _round_up_to_power_of_two(TALL)),
        tl.arange(0, _round_up_to_power_of_two(WIDE)),
    )
    score = tl.dot(q, tl.trans(k), input_precision="ieee")
    if REST:
        score = tl.dot(q_rest, tl.trans(k_rest), score, input_precision="ieee")
    score = tl.dot(by_row, (row[:, None] == ky[None, :]).to(q.dtype), score, input_precision="ieee")
    score = tl.dot(
        by_column, (column[:, None] == kx[None, :]).to(q.dtype), score, input_precision="ieee"
    )
    score *= scale * LOG2E
    if LAST:
        score = tl.where(key_valid[None, :], score, float("-inf"))
    new_max, rescale, weight = softmax_weights(score, row_max)
    exp_sum = exp_sum * rescale + tl.sum(weight, 1)
    v, v_rest = _load_rows(v_at, key_valid, DIM, MAIN, REST)
    weight = weight.to(v.dtype)
    acc = tl.dot(weight, v, acc * rescale[:, None], input_precision="ieee")
    if REST:
        acc_rest = tl.dot(weight, v_rest, acc_rest * rescale[:, None], input_precision="ieee")
    return new_max, exp_sum, acc, acc_rest


@triton.jit
def _normalize_and_store_output(
    at, row_valid, acc, acc_rest, exp_sum, DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr
):
    channel = tl.arange(0, MAIN)
    rest_channel = MAIN + tl.arange(0, max(REST, 16))
    dtype: tl.constexpr = at.dtype.element_ty
    tl.store(
        at[:, None] + channel,
        (acc / exp_sum[:, None]).to(dtype),
        mask=row_valid[:, None] & (channel < DIM),
    )
    if REST:
        tl.store(
            at[:, None] + rest_channel,
            (acc_rest / exp_sum[:, None]).to(dtype),
            mask=row_valid[:, None] & (rest_channel < DIM),
        )


def global_attention(
    qkv: torch.Tensor, rel_h: torch.Tensor, rel_w: torch.Tensor, out: torch.Tensor
) -> None:
    """The same without windows, for images whose width is a power of two from 16 to 128."""
    batch, height, width, _, heads, dim = qkv.shape
    by_row, by_column = relative_score_tables(qkv, rel_h, rel_w)
    block_m, _, warps, stages, registers = _global_config(qkv)
    main, rest = split_head_dim(dim)
    grid = (-(-(height * width) // block_m), heads, batch)
    _global_kernel[grid](
        qkv, by_row, by_column, out, dim**-0.5, *qkv.stride()[:5],
        HEADS=heads, DIM=dim, TALL=height, WIDE=width, MAIN=main, REST=rest, BLOCK_M=block_m,
        num_warps=warps, num_stages=stages, maxnreg=registers or None,
        **pdl_launch_options(qkv.device, batch * height * width),
    )  # fmt: skip


def _global_config(qkv: torch.Tensor) -> AttentionLaunchConfig:
    if qkv.dtype == torch.float32:
        return 16, 0, 4, 1, 0
    # three stages hold two rows of keys and values, beside the queries and the softmax weights
    queries, width, block_d = 64, qkv.shape[2], sum(split_head_dim(qkv.shape[-1]))
    three_stages = 2 * (queries * (block_d + width) + 2 * 2 * width * block_d)
    return queries, 0, 4, 3 if three_stages <= max_shared_bytes(qkv.device) else 2, 0


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
    query_valid = query < TALL * WIDE
    base = qkv_ptr + batch * batch_stride + head * head_stride
    pdl_wait_and_trigger(PDL)
    q, q_rest = _load_rows(
        base + query // WIDE * y_stride + query % WIDE * x_stride, query_valid, DIM, MAIN, REST
    )
    key_x = tl.arange(0, WIDE)
    out_row = (batch * TALL * WIDE + query) * HEADS + head
    column_term = tl.load(
        column_ptr + out_row[:, None] * WIDE + key_x, mask=query_valid[:, None], other=0.0
    ).to(tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    exp_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, MAIN], tl.float32)
    acc_rest = tl.zeros([BLOCK_M, max(REST, 16)], tl.float32)
    all_valid = key_x >= 0
    key_at = base + part_stride + key_x * x_stride
    for ky in range(0, TALL):
        k, k_rest = _load_rows(key_at + ky * y_stride, all_valid, DIM, MAIN, REST)
        row_term = tl.load(row_ptr + out_row * TALL + ky, mask=query_valid, other=0.0).to(
            tl.float32
        )
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST:
            score = tl.dot(q_rest, tl.trans(k_rest), score, input_precision="ieee")
        score = score * (scale * LOG2E) + column_term
        # the row term is the same for all keys of the row
        new_max = tl.maximum(row_max, tl.max(score, 1) + row_term)
        weight = tl.exp2(score - (new_max - row_term)[:, None])
        rescale = tl.exp2(row_max - new_max)
        exp_sum = exp_sum * rescale + tl.sum(weight, 1)
        v, v_rest = _load_rows(key_at + ky * y_stride + part_stride, all_valid, DIM, MAIN, REST)
        weight = weight.to(v.dtype)
        acc = tl.dot(weight, v, acc * rescale[:, None], input_precision="ieee")
        if REST:
            acc_rest = tl.dot(weight, v_rest, acc_rest * rescale[:, None], input_precision="ieee")
        row_max = new_max
    _normalize_and_store_output(
        out_ptr + out_row * DIM, query_valid, acc, acc_rest, exp_sum, DIM, MAIN, REST
    )


def relative_score_tables(
    qkv: torch.Tensor, rel_h: torch.Tensor, rel_w: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Position terms of all queries, times log2 e: [B, H, W, heads, H] and [B, H, W, heads, W].

    They are q · rel_h[yq − yk + H − 1] and q · rel_w[xq − xk + W − 1].
    """
    batch, height, width, _, heads, dim = qkv.shape
    by_row = torch.empty((batch, height, width, heads, height), dtype=qkv.dtype, device=qkv.device)
    by_column = torch.empty(
        (batch, height, width, heads, width), dtype=qkv.dtype, device=qkv.device
    )
    main, rest = split_head_dim(dim)
    batch_stride, y_stride, x_stride, _, head_stride = qkv.stride()[:5]
    # per program: all queries of one row with all rows, or of one column with all columns
    for table, target, lines, long, line_stride, step in (
        (rel_h, by_row, height, width, y_stride, x_stride),
        (rel_w, by_column, width, height, x_stride, y_stride),
    ):
        vertical = target is by_row
        block, places = max(16, next_power_of_two(long)), max(16, next_power_of_two(lines))
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
    query_index = tl.program_id(0) // lines * BLOCK + tl.arange(0, BLOCK)
    key_index = tl.arange(0, PLACES)
    table, table_rest = _load_rows(
        table_ptr + (line - key_index + lines - 1) * DIM, key_index < lines, DIM, MAIN, REST
    )
    pdl_wait_and_trigger(PDL)
    at = (
        qkv_ptr
        + batch * batch_stride
        + head * head_stride
        + line * line_stride
        + query_index * step
    )
    q, q_rest = _load_rows(at, query_index < long, DIM, MAIN, REST)
    products = tl.dot(q, tl.trans(table), input_precision="ieee")
    if REST:
        products = tl.dot(q_rest, tl.trans(table_rest), products, input_precision="ieee")
    products = products * LOG2E
    token = (batch * lines * long + line * line_tokens + query_index * step_tokens) * HEADS + head
    inside = (query_index < long)[:, None] & (key_index < lines)[None, :]
    tl.store(
        out_ptr + token[:, None] * lines + key_index,
        products.to(out_ptr.dtype.element_ty),
        mask=inside,
    )
