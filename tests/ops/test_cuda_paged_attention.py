"""Prefill attention in CUDA C++ beyond what every variant is asked: what lies beside the context
must not matter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelmill.ops import registry
from modelmill.ops.attention_support import AttentionPhase
from modelmill.ops.cuda.attention import paged_attention as variant
from modelmill.ops.paged_attention import DECLARATION, PagedAttentionInputs, paged_attention
from tests.ops.paged_batches import (
    attention_arguments,
    check_step,
    in_float64,
    serves_part,
    shuffled_pages,
)

LIMIT = {torch.bfloat16: 6e-3, torch.float16: 1e-3}  # of the whole, in the norm


@given(st.integers(1, 64), st.integers(1, 1 << 30))
def test_heads_at_once_divide_the_heads_and_fit_the_cache(kv_heads: int, each: int) -> None:
    heads_per_pass = variant._heads_per_pass(kv_heads, each)
    assert kv_heads % heads_per_pass == 0
    assert heads_per_pass == 1 or heads_per_pass * each <= variant.L2_RESIDENT_BYTES


def _arguments(
    lengths: list[tuple[int, int]],
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 128,
    page: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    window: int | None = None,
) -> dict[str, Any]:
    """Caches full of NaN but for the tokens that exist; page tables that name nonsense past the
    context.
    """
    generator = torch.Generator().manual_seed(len(lengths) + dim + page)
    counts, order, tables = shuffled_pages(lengths, page, generator)
    pages = sum(map(len, order))
    caches = torch.full((2, pages, kv_heads, page, dim), float("nan"))
    for b, (_, context) in enumerate(lengths):
        tables[b, : counts[b]] = order[b]
        tokens = torch.randn(2, counts[b] * page, kv_heads, dim, generator=generator)
        tokens[:, context:] = float("nan")
        caches[:, order[b].long()] = tokens.view(2, counts[b], page, kv_heads, dim).transpose(2, 3)
    q = torch.randn(sum(n for n, _ in lengths), heads, dim, generator=generator)
    caches = caches.to("cuda", dtype)
    return attention_arguments(q.to("cuda", dtype), caches, tables, lengths, window)


def _check(args: dict[str, Any]) -> None:
    truth = paged_attention(PagedAttentionInputs(**in_float64(args)))
    check_step(args, truth, LIMIT[args["q"].dtype])


RAGGED = [(300, 1000), (17, 33), (129, 129), (1, 1), (1, 999), (64, 64), (128, 2050)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", [(2, 2), (28, 4)])
def test_ragged_batches_with_history(dtype: torch.dtype, dim: int, heads: tuple[int, int]) -> None:
    _check(_arguments(RAGGED, *heads, dim=dim, dtype=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [17, 63, 64, 65, 127, 128, 129, 255, 257])
@pytest.mark.parametrize("history", [0, 1, 15, 16, 127, 128])
def test_every_edge_of_a_tile(queries: int, history: int) -> None:
    _check(_arguments([(queries, queries + history), (130, 130)]))


@pytest.mark.gpu
@pytest.mark.parametrize("page", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("dim", [64, 128])
def test_page_sizes(page: int, dim: int) -> None:
    _check(_arguments([(300, 1000), (17, 33), (129, 129)], page=page, dim=dim))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [1, 100, 128, 5000])
def test_windows(window: int) -> None:
    _check(_arguments([(300, 1000), (700, 700), (20, 20)], window=window))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "lengths",
    [[(30, 30), (5, 0), (130, 131), (1, 0)], [(0, 50), (130, 130), (0, 0), (2, 2)]],
    ids=str,
)
def test_padding_and_absent_sequences(lengths: list[tuple[int, int]]) -> None:
    _check(_arguments(lengths))


@pytest.mark.gpu
def test_many_sequences() -> None:
    _check(
        _arguments([(1 + i * 37 % 90, 1 + i * 37 % 90 + i * 53 % 300) for i in range(600)], 2, 1)
    )
    _check(
        _arguments([(66 + i % 3, 70 + i % 50) for i in range(variant.MAX_SEQUENCES)], 2, 2, dim=64)
    )


@pytest.mark.gpu
def test_more_tiles_than_multiprocessors() -> None:
    _check(_arguments([(2048, 4096), (33, 8000)], 32, 8))


@pytest.mark.gpu
def test_the_prefill_kernel_can_take_all_rows_of_a_mixed_step() -> None:
    """Where no kernel decodes, the prefill kernel takes all rows of a mixed step."""
    args = _arguments(RAGGED)
    actual = variant.prefill(PagedAttentionInputs(**args), mixed=False)
    run = registry.select_backends("cuda").paged_attention
    assert float((actual - run(PagedAttentionInputs(**args))).norm() / actual.norm()) < 1e-2


@pytest.mark.gpu
def test_what_it_does_not_serve_is_refused() -> None:
    args = _arguments([(20, 20), (140, 150)])
    assert serves_part(args)
    eight = args["k_cache"].nan_to_num().to(torch.float8_e4m3fn)
    for change in (
        {"k_cache": eight, "v_cache": eight},
        {"q": args["q"].float()},
        {"q": args["q"].new_empty(160 * 4 * 128 + 1)[1:].view(160, 4, 128)},  # not at 16 bytes
        {"k_cache": args["k_cache"].transpose(1, 2), "v_cache": args["v_cache"].transpose(1, 2)},
        {"block_tables": args["block_tables"].long()},
    ):
        assert not serves_part(args | change), list(change)


@pytest.mark.gpu
def test_steps_that_are_too_small_for_its_tiles() -> None:
    """Prompts are left to the variant behind, single queries beside them are decoded."""
    args = _arguments([(20, 20), (140, 150)])
    problem = DECLARATION.make_problem(PagedAttentionInputs(**args))
    prompts = problem._replace(phase=AttentionPhase.PROMPTS)
    assert variant.PREFILL.range.covers(prompts)
    assert not variant.PREFILL.range.covers(prompts._replace(queries=64))
    assert not variant.PREFILL.range.covers(
        prompts._replace(m=120)
    )  # the launch takes longer than all else
    assert not serves_part(_arguments([(40, 70)]))
    _check(_arguments([(40, 70), (1, 90), (3, 3), (1, 1), (1, 0)]))
