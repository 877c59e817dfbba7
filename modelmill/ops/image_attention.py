"""Attention over an image's tokens, whole or by windows, with positions added to the scores.

Two kinds of positions: SAM's decomposed relative ones (Li et al. 2022, arXiv:2112.01526), which
depend on the query, and a table of biases by offset (Graham et al. 2021, LeViT, arXiv:2104.01136),
which does not.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from modelmill.ops.case import Case, nbytes, randn

TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def image_attention(
    qkv: torch.Tensor,
    heads: int,
    window: int | None,
    fill: torch.Tensor | None,
    rel_h: torch.Tensor | None = None,
    rel_w: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q kᵀ / √D + positions) v inside each window of each image.

    qkv: [B, H, W, 3, heads, D]. window: side of the square windows, which tile the image from its
    upper left corner; None: the image is one. Where windows reach over the edge, the tokens out
    there are keys like any other: fill
    [3, heads, D] is what they hold. rel_h: [2·Sh − 1, D], rel_w: [2·Sw − 1, D], S the window's
    height and width: a score gets q · rel_h[yq − yk + Sh − 1] + q · rel_w[xq − xk + Sw − 1], of the
    q that is not scaled. bias:
    [heads, S·S] float32: a score gets bias[head, |yq − yk| · S + |xq − xk|]. Returns [B, H, W, heads·D].
    """  # noqa: E501
    batch, height, width, _, _, dim = qkv.shape
    tall, wide = (height, width) if window is None else (window, window)
    down, right = -height % tall, -width % wide
    if down or right:
        assert fill is not None, "windows over the edge need a fill"
        padded = (
            fill.to(qkv.dtype).expand(batch, height + down, width + right, 3, heads, dim).clone()
        )
        padded[:, :height, :width] = qkv
        qkv = padded
    rows, columns = (height + down) // tall, (width + right) // wide
    tiles = qkv.view(batch, rows, tall, columns, wide, 3, heads, dim).permute(
        5, 0, 1, 3, 6, 2, 4, 7
    )
    q, k, v = tiles.reshape(3, batch * rows * columns, heads, tall * wide, dim)
    added = None
    if rel_h is not None and rel_w is not None:
        added = _relative_scores(q, rel_h, rel_w, tall, wide)
    elif bias is not None:
        added = bias[:, relative_offsets(tall, wide, bias.device)].to(q.dtype)[None]
    mixed = F.scaled_dot_product_attention(q, k, v, added)
    mixed = mixed.view(batch, rows, columns, heads, tall, wide, dim).permute(0, 1, 4, 2, 5, 3, 6)
    mixed = mixed.reshape(batch, height + down, width + right, heads * dim)
    return mixed[:, :height, :width].contiguous()


def relative_offsets(height: int, width: int, device: torch.device) -> torch.Tensor:
    """[S·S, S·S] int64: |Δy| · wide + |Δx| between the tokens of a window."""
    place = torch.arange(height * width, device=device)
    y, x = place // width, place % width
    return (y[:, None] - y).abs() * width + (x[:, None] - x).abs()


def _relative_scores(
    q: torch.Tensor, rel_h: torch.Tensor, rel_w: torch.Tensor, height: int, width: int
) -> torch.Tensor:
    """q: [N, heads, tall·wide, D] → what positions add to the scores, [N, heads, tall·wide,
    tall·wide].
    """
    n, heads, _, dim = q.shape
    up = torch.arange(height, device=q.device)
    across = torch.arange(width, device=q.device)
    by_row = rel_h.to(q.dtype)[up[:, None] - up + height - 1]
    by_column = rel_w.to(q.dtype)[across[:, None] - across + width - 1]
    at = q.view(n, heads, height, width, dim)
    rows = torch.einsum("nhyxd,ykd->nhyxk", at, by_row)
    columns = torch.einsum("nhyxd,xkd->nhyxk", at, by_column)
    return (rows[..., :, None] + columns[..., None, :]).reshape(
        n, heads, height * width, height * width
    )


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Windows that fit, that reach over the edge, one window; both kinds of positions; head sizes
    16 to 80.
    """
    shapes: list[tuple[str, int, int, int, int, int, int | None, str]] = [
        ("whole", 1, 6, 6, 2, 32, None, "relative"),
        ("oblong", 2, 5, 7, 2, 16, None, "relative"),
        ("windows", 1, 8, 8, 3, 80, 4, "relative"),
        ("edge", 2, 7, 9, 2, 64, 4, "relative"),
        ("biased", 1, 9, 9, 4, 32, 7, "bias"),
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
