"""Attention over an image's tokens, global or windowed, with positions added to the scores.

Two kinds of positions: SAM's decomposed relative ones (Li et al. 2022, arXiv:2112.01526), which
depend on the query, and a table of biases by offset (Graham et al. 2021, LeViT, arXiv:2104.01136),
which does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.op_cost import OpCost, tensor_bytes

TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class ImageAttentionInputs(NamedTuple):
    """Queries, keys and values of images, the windows and the positions.

    Below, Sh and Sw are a window's height and width, S = Sw for the bias.

    Attributes:
        qkv: [B, H, W, 3, heads, D].
        heads: number of heads.
        window: side of the square windows; None: one window per image.
        fill: [3, heads, D], q, k and v of tokens beyond the edge.
        rel_h: [2·Sh − 1, D]; a score gets q · rel_h[yq − yk + Sh − 1], q not scaled.
        rel_w: [2·Sw − 1, D]; a score gets q · rel_w[xq − xk + Sw − 1], q not scaled.
        bias: [heads, S·S] float32; a score gets bias[head, |yq − yk| · S + |xq − xk|].
    """

    qkv: torch.Tensor
    heads: int
    window: int | None
    fill: torch.Tensor | None
    rel_h: torch.Tensor | None = None
    rel_w: torch.Tensor | None = None
    bias: torch.Tensor | None = None


def _count_windows(args: Mapping[str, Any], result: torch.Tensor) -> OpCost:
    """Count every tensor once, and the pairs of each whole window."""
    batch, height, width, _, heads, dim = args["qkv"].shape
    side = args.get("window")
    rows, columns = (height, width) if side is None else (side, side)
    windows = batch * -(-height // rows) * -(-width // columns)
    operations = 4 * windows * heads * dim * (rows * columns) ** 2
    return OpCost(tensor_bytes((*args.values(), result)), 0, operations)


DECLARATION = OpDeclaration(inputs=ImageAttentionInputs, cost=_count_windows)


def image_attention(inputs: ImageAttentionInputs) -> torch.Tensor:
    """Compute softmax(q kᵀ / √D + positions) v inside each window of each image.

    Windows tile the image from its upper left corner. Tokens of a window beyond the edge are keys
    like any other, with the values of ``fill``.

    Returns:
        [B, H, W, heads·D].
    """
    qkv, heads, window, fill, rel_h, rel_w, bias = inputs
    batch, height, width, _, _, dim = qkv.shape
    win_h, win_w = (height, width) if window is None else (window, window)
    pad_h, pad_w = -height % win_h, -width % win_w
    if pad_h or pad_w:
        assert fill is not None, "windows that reach beyond the edge need fill"
        padded = (
            fill.to(qkv.dtype).expand(batch, height + pad_h, width + pad_w, 3, heads, dim).clone()
        )
        padded[:, :height, :width] = qkv
        qkv = padded
    rows, columns = (height + pad_h) // win_h, (width + pad_w) // win_w
    tiles = qkv.view(batch, rows, win_h, columns, win_w, 3, heads, dim).permute(
        5, 0, 1, 3, 6, 2, 4, 7
    )
    q, k, v = tiles.reshape(3, batch * rows * columns, heads, win_h * win_w, dim)
    scores_bias = None
    if rel_h is not None and rel_w is not None:
        scores_bias = _relative_scores(q, rel_h, rel_w, win_h, win_w)
    elif bias is not None:
        scores_bias = bias[:, abs_offset_indices(win_h, win_w, bias.device)].to(q.dtype)[None]
    out = F.scaled_dot_product_attention(q, k, v, scores_bias)
    out = out.view(batch, rows, columns, heads, win_h, win_w, dim).permute(0, 1, 4, 2, 5, 3, 6)
    out = out.reshape(batch, height + pad_h, width + pad_w, heads * dim)
    return out[:, :height, :width].contiguous()


def abs_offset_indices(height: int, width: int, device: torch.device) -> torch.Tensor:
    """[S·S, S·S] int64: |Δy| · width + |Δx| between the tokens of a window."""
    index = torch.arange(height * width, device=device)
    y, x = index // width, index % width
    return (y[:, None] - y).abs() * width + (x[:, None] - x).abs()


def _relative_scores(
    q: torch.Tensor, rel_h: torch.Tensor, rel_w: torch.Tensor, height: int, width: int
) -> torch.Tensor:
    """Position terms of the scores.

    q: [N, heads, S, D], S = height·width tokens of a window. Returns [N, heads, S, S].
    """
    n, heads, _, dim = q.shape
    y = torch.arange(height, device=q.device)
    x = torch.arange(width, device=q.device)
    by_row = rel_h.to(q.dtype)[y[:, None] - y + height - 1]
    by_column = rel_w.to(q.dtype)[x[:, None] - x + width - 1]
    grid = q.view(n, heads, height, width, dim)
    rows = torch.einsum("nhyxd,ykd->nhyxk", grid, by_row)
    columns = torch.einsum("nhyxd,xkd->nhyxk", grid, by_column)
    return (rows[..., :, None] + columns[..., None, :]).reshape(
        n, heads, height * width, height * width
    )


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Windows that fit or overlap the edge, global; all position types; head sizes 16 to 88."""
    shapes: list[tuple[str, int, int, int, int, int, int | None, str]] = [
        ("whole", 1, 6, 6, 2, 32, None, "relative"),
        ("oblong", 2, 5, 7, 2, 16, None, "relative"),
        ("windows", 1, 8, 8, 3, 80, 4, "relative"),
        ("edge", 2, 7, 9, 2, 64, 4, "relative"),
        ("biased", 1, 9, 9, 2, 32, 7, "bias"),
        ("plain", 1, 4, 4, 2, 88, None, "none"),
    ]
    if device != "cpu":
        shapes += [
            ("fourteen", 2, 28, 14, 5, 80, 14, "relative"),
            ("fourteen-edge", 2, 20, 17, 3, 64, 14, "relative"),
            ("wide", 2, 16, 32, 3, 80, None, "relative"),
            ("vit-h-window", 1, 64, 64, 16, 80, 14, "relative"),
            ("vit-h-global", 1, 64, 64, 16, 80, None, "relative"),
        ]
    for seed, (name, batch, height, width, heads, dim, window, positions) in enumerate(shapes):
        tall, wide = (height, width) if window is None else (window, window)
        qkv = randn(batch, height, width, 3, heads, dim, device=device, dtype=dtype, seed=seed)
        args = {"qkv": qkv, "heads": heads, "window": window, "fill": None}
        if window is not None:
            args["fill"] = randn(3, heads, dim, device=device, dtype=dtype, seed=seed + 50)
        if positions == "relative":
            args["rel_h"] = randn(
                2 * tall - 1, dim, device=device, dtype=dtype, seed=seed + 60, scale=0.2
            )
            args["rel_w"] = randn(
                2 * wide - 1, dim, device=device, dtype=dtype, seed=seed + 70, scale=0.2
            )
        elif positions == "bias":
            args["bias"] = randn(
                heads, tall * wide, device=device, dtype=torch.float32, seed=seed + 80
            )
        windows = batch * -(-height // tall) * -(-width // wide)
        yield Case(name, args, 4 * nbytes(qkv) // 3, 4 * windows * heads * dim * (tall * wide) ** 2)
