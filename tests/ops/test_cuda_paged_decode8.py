"""Decoding over pages of int8 in whole numbers: what lies beside the context must not matter, and
every edge.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.ops import registry
from modelmill.ops.cuda.attention import paged_decode8
from modelmill.ops.paged_attention import PagedAttentionInputs
from modelmill.ops.paged_attention import paged_attention as reference
from tests.ops.nvcc import compiles_without_spills, requires_nvcc
from tests.ops.paged_batches import (
    attention_arguments,
    check_step,
    of_every_page_size,
    select_single_token_sequences,
    shuffled_pages,
)

# of the whole, in the norm: the output's own rounding
LIMIT = {torch.bfloat16: 2.5e-3, torch.float16: 4e-4}


@requires_nvcc
@pytest.mark.parametrize(("dim", "page", "splits"), [(128, 16, 1), (128, 8, 2), (64, 128, 8)])
def test_compiles_without_spills(dim: int, page: int, splits: int, tmp_path: Path) -> None:
    dtype = torch.float16 if dim == 64 else torch.bfloat16
    compiles_without_spills(
        "paged_decode8.cu", paged_decode8._kernel_macros(dtype, dim, page, splits), tmp_path / "out"
    )


def _arguments(
    lengths: list[tuple[int, int]], heads: int = 4, dim: int = 128, page: int = 16,
    dtype: torch.dtype = torch.bfloat16, window: int | None = None, device: str = "cuda",
) -> dict[str, Any]:  # fmt: skip
    """Scales of NaN but for the tokens that exist; page tables that name nonsense past the
    context.
    """
    generator = torch.Generator().manual_seed(len(lengths) + dim + page)
    counts, order, tables = shuffled_pages(lengths, page, generator)
    pages = sum(map(len, order))
    scales = torch.full((2, pages, heads, page), float("nan"))
    for b, (_, context) in enumerate(lengths):
        tables[b, : counts[b]] = order[b]
        drawn = torch.rand(2, counts[b] * page, heads, generator=generator) * 0.03 + 0.001
        drawn[1, ::5] = 1e-8
        drawn[:, context:] = float("nan")
        scales[:, order[b].long()] = drawn.view(2, counts[b], page, heads).transpose(2, 3)
    caches = torch.randint(
        -128, 128, (2, pages, heads, page, dim), generator=generator, dtype=torch.int8
    ).to(device)
    q = torch.randn(sum(n for n, _ in lengths), heads + 1, dim, generator=generator)[:, :heads] * 2
    scales = scales.to(device)
    args = attention_arguments(q.to(device, dtype), caches, tables, lengths, window)
    return args | {"k_scale": scales[0], "v_scale": scales[1]}


def _check(args: dict[str, Any]) -> None:
    floats = ("q", "k_scale", "v_scale")
    wide = {k: v.double() if k in floats else v for k, v in args.items()}
    truth = reference(PagedAttentionInputs(**wide))
    check_step(args, truth, LIMIT[args["q"].dtype], select_single_token_sequences(args))


EDGES = [(1, n) for n in (1, 2, 31, 32, 33, 127, 128, 129, 500, 1025)]


@of_every_page_size
def test_every_edge_and_page_size(page: int, dim: int, dtype: torch.dtype) -> None:
    _check(_arguments(EDGES, dim=dim, page=page, dtype=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "lengths", [[(1, 5000)], [(1, 4096)] * 3, [(1, 900)] * 70, [(1, 40)] * 300], ids=len
)
def test_few_and_many_sequences(lengths: list[tuple[int, int]]) -> None:
    _check(_arguments(lengths, heads=8))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [1, 33, 128, 5000])
def test_windows(window: int) -> None:
    _check(_arguments(EDGES, window=window))


@pytest.mark.gpu
def test_padding_and_prompts_beside_it() -> None:
    _check(_arguments([(1, 30), (1, 0), (1, 131), (1, 0)]))
    _check(_arguments([(30, 30), (1, 131), (129, 400), (1, 1), (1, 999)]))
    _check(_arguments([(30, 30), (2, 131)] + [(1, 77)] * 20, dim=64))


@pytest.mark.gpu
def test_what_is_no_number_stays_none() -> None:
    args = _arguments([(1, 100), (1, 200)])
    args["q"][1, 2, 5] = float("inf")
    actual = (
        registry.select_backends("cuda")
        .paged_attention(PagedAttentionInputs(**args))
        .view(2, 4, 128)
    )
    assert actual[1, 2].isnan().all()
    assert not actual[0].isnan().any()
    assert not actual[1, 3].isnan().any()
