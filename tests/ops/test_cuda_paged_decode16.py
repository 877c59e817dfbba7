"""Decoding over pages of 16 bits: what lies beside the context must not matter, every edge, every
size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelmill.ops import registry
from modelmill.ops.cuda.attention import paged_decode16
from modelmill.ops.paged_attention import PagedAttentionInputs
from modelmill.ops.paged_attention import paged_attention as reference
from modelmill.ops.score_mods import ScoreMods
from tests.ops.nvcc import compiles_without_spills, requires_nvcc
from tests.ops.paged_batches import (
    attention_arguments,
    check_step,
    in_float64,
    of_every_page_size,
    select_single_token_sequences,
    serves_part,
    shuffled_pages,
)

# of the whole, in the norm: the output's own rounding
LIMIT = {torch.bfloat16: 2.5e-3, torch.float16: 3e-4}
SIZES = [(64, 128, 1, 8), (64, 8, 8, 1), (80, 16, 3, 1), (96, 16, 4, 2), (112, 8, 1, 1)]
SIZES += [(128, 16, 1, 1), (128, 8, 8, 2), (128, 128, 4, 8), (256, 8, 8, 1), (256, 16, 1, 8)]


@requires_nvcc
@pytest.mark.parametrize(("dim", "page", "group", "splits"), SIZES)
def test_compiles_without_spills(
    dim: int, page: int, group: int, splits: int, tmp_path: Path
) -> None:
    dtype = torch.float16 if dim == 64 else torch.bfloat16
    config = paged_decode16.SPLIT_CONFIGS[dim]
    others = (
        [paged_decode16.UNSPLIT_CONFIGS.get(dim, config)]
        if splits == 1
        else [paged_decode16.GQA_CONFIGS.get(dim, config)]
    )
    others += paged_decode16.FEW_PAIRS_CONFIGS.get(dim, ())
    # the place of the output, which is read again behind the loop
    spilled = 4 if (dim, group, splits) == (256, 8, 1) else 0
    for each in dict.fromkeys((config, *others)):
        macros = paged_decode16.kernel_macros(dtype, dim, page, group, splits, each)
        compiles_without_spills("paged_decode16.cu", macros, tmp_path / "out", spilled)


@requires_nvcc
def test_sinks_compile_without_spills(tmp_path: Path) -> None:
    config = paged_decode16.SPLIT_CONFIGS[64]
    macros = paged_decode16.kernel_macros(torch.bfloat16, 64, 16, 8, 2, config, sinks=True)
    compiles_without_spills("paged_decode16.cu", macros, tmp_path / "out")


def _arguments(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int] = (4, 4),
    dim: int = 128,
    page: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    window: int | None = None,
    device: str = "cuda",
    *,
    sinks: bool = False,
) -> dict[str, Any]:
    """Caches of NaN but for the tokens that exist and are seen; page tables that name nonsense
    elsewhere. sinks: a logit of each head, some above all scores.
    """
    generator = torch.Generator().manual_seed(len(lengths) + dim + page)
    counts, order, tables = shuffled_pages(lengths, page, generator)
    pages = sum(map(len, order))
    caches = torch.full((2, pages, heads[1], page, dim), float("nan"))
    for b, (queries, context) in enumerate(lengths):
        first_key = 0 if window is None else max(0, context - queries + 1 - window)
        drawn = torch.randn(2, counts[b] * page, heads[1], dim, generator=generator)
        drawn[0, ::7] *= 4
        drawn[:, context:] = float("nan")
        drawn[:, :first_key] = float("nan")
        caches[:, order[b].long()] = drawn.view(2, counts[b], page, heads[1], dim).transpose(2, 3)
        # a page in front of the window belongs to another sequence
        tables[b, first_key // page : counts[b]] = order[b][first_key // page :]
    tokens = sum(n for n, _ in lengths)
    q = torch.randn(tokens, heads[0] + 1, dim, generator=generator)[:, : heads[0]]
    caches = caches.to(device, dtype)
    args = attention_arguments(q.to(dtype).to(device), caches, tables, lengths, window)
    if sinks:
        logits = torch.randn(heads[0], generator=generator) * 4
        args["score_mods"] = ScoreMods(sinks=logits.to(device))
    return args


def _truth(args: dict[str, Any]) -> torch.Tensor:
    """The reference in float64; what it must not look at is made harmless for it."""
    wide = in_float64(args)
    wide["k_cache"], wide["v_cache"] = wide["k_cache"].nan_to_num(), wide["v_cache"].nan_to_num()
    wide["block_tables"] = wide["block_tables"].clamp(0, args["k_cache"].shape[0] - 1)
    return reference(PagedAttentionInputs(**wide))


def _check(args: dict[str, Any], *, served: bool = True) -> None:
    limit = LIMIT[args["q"].dtype]
    check_step(args, _truth(args), limit, select_single_token_sequences(args), served=served)


@given(
    st.integers(1, 9000),
    st.integers(1, 8),
    st.sampled_from([64, 80, 128, 256]),
    st.integers(1, 40_000),
)
def test_a_step_has_room_where_its_contexts_are_split(
    pairs: int, group: int, dim: int, keys: int
) -> None:
    config, splits = paged_decode16.choose_config_and_splits(pairs, group, dim, keys, 132)
    assert splits == 1 or pairs * splits <= 132 * config.blocks_per_sm
    assert splits == 1 or keys > (splits - 1) * config.min_keys


@given(
    st.sampled_from([(32, 32), (32, 8), (14, 2)]),
    st.integers(1, 300),
    st.integers(1, 8000),
    st.data(),
)
def test_forms_are_all_that_a_step_can_meet(
    heads: tuple[int, int], most: int, longest: int, data: st.DataObject
) -> None:
    def plan_for(batch: int, keys: int) -> object:
        return paged_decode16.choose_config_and_splits(
            batch * heads[1], heads[0] // heads[1], 128, keys, 132
        )

    listed = paged_decode16.warmup_sizes(heads, 128, most, longest, 132)
    assert all(1 <= batch <= most and 1 <= keys <= longest for batch, keys in listed)
    assert plan_for(data.draw(st.integers(1, most)), data.draw(st.integers(1, longest))) in {
        plan_for(*each) for each in listed
    }


EDGES = [(1, n) for n in (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 500, 1025)]


@of_every_page_size
def test_every_edge_and_page_size(page: int, dim: int, dtype: torch.dtype) -> None:
    _check(_arguments(EDGES, dim=dim, page=page, dtype=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [80, 96, 112, 256])
def test_other_heads(dim: int) -> None:
    _check(_arguments(EDGES, (6, 2), dim, 8))
    _check(_arguments(EDGES, (2, 2), dim, 32, torch.float16, window=70))
    _check(_arguments([(1, 3000), (1, 33)], (8, 1), dim, 16))


@pytest.mark.gpu
@pytest.mark.parametrize("group", range(1, 9))
def test_query_heads_of_a_kv_head(group: int) -> None:
    _check(_arguments(EDGES, (3 * group, 3)))
    _check(_arguments([(1, 3000), (1, 33)], (2 * group, 2), 64, 8, torch.float16))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [1, 8, 33, 128, 5000])
@pytest.mark.parametrize("page", [8, 64])
def test_windows(window: int, page: int) -> None:
    _check(_arguments(EDGES, window=window, page=page))
    _check(_arguments(EDGES, (8, 2), 64, page, window=window))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("heads", [(8, 8), (64, 8)], ids=str)
def test_sinks(heads: tuple[int, int], window: int | None) -> None:
    _check(_arguments(EDGES, heads, 64, window=window, sinks=True))
    _check(_arguments([(1, 3000), (1, 33)], heads, 64, 16, torch.float16, window, sinks=True))
    _check(_arguments([(30, 30), (1, 131), (129, 400), (1, 999)], heads, 64, sinks=True))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(8, 8), (32, 8)], ids=str)
@pytest.mark.parametrize(
    "lengths", [[(1, 5000)], [(1, 4096)] * 3, [(1, 900)] * 70, [(1, 40)] * 300], ids=len
)
def test_few_and_many_sequences(lengths: list[tuple[int, int]], heads: tuple[int, int]) -> None:
    served = heads[0] == heads[1] or len(lengths) * heads[1] <= paged_decode16.MAX_CONCURRENT_PAIRS
    _check(_arguments(lengths, heads), served=served)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
def test_padding_and_prompts_beside_it(heads: tuple[int, int]) -> None:
    _check(_arguments([(1, 30), (1, 0), (1, 131), (1, 0)], heads))
    # prompts: paged_attention.cu
    _check(_arguments([(30, 30), (1, 131), (129, 400), (1, 1), (1, 999)], heads))
    # prompts: the variant behind
    _check(_arguments([(30, 30), (2, 131)] + [(1, 77)] * 20, heads, dim=64))
    _check(_arguments([(30, 30), (1, 131), (129, 400), (1, 999)], heads, dim=96))


@pytest.mark.gpu
@pytest.mark.parametrize(("place", "value"), [("q", "inf"), ("q", "-inf"), ("k_cache", "nan")])
def test_what_is_no_number_stays_none(place: str, value: str) -> None:
    args = _arguments([(1, 100), (1, 200)], (8, 4))
    if place == "q":
        args["q"][1, 2, 5] = float(value)
    else:
        args["k_cache"][args["block_tables"][1, 3].item(), 1, 4, 7] = float(value)
    actual = (
        registry.select_backends("cuda")
        .paged_attention(PagedAttentionInputs(**args))
        .view(2, 8, 128)
    )
    assert actual[1, 2].isnan().all()
    assert actual[1, 3].isnan().all() == (place == "k_cache")
    assert not actual[0].isnan().any()
    assert not actual[1, 4:].isnan().any()


@pytest.mark.gpu
def test_a_graph_serves_shorter_contexts() -> None:
    args = _arguments([(1, 1000), (1, 300)], (8, 2))
    run = registry.select_backends("cuda").paged_attention
    run(PagedAttentionInputs(**args))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = run(PagedAttentionInputs(**args))
    for lengths in ((1000, 300), (1, 0), (17, 299), (0, 64)):
        args["context_lens"].copy_(torch.tensor(lengths))
        graph.replay()
        torch.cuda.synchronize()
        truth = _truth(args)
        assert float((actual.double() - truth).norm()) <= 2.5e-3 * float(truth.norm())


@pytest.mark.gpu
def test_what_it_does_not_serve_is_refused() -> None:
    args = _arguments([(1, 20), (1, 150)])
    assert serves_part(args)
    flat = args["q"].new_empty(2 * 4 * 128 + 1)[1:].view(2, 4, 128)
    for change in (
        {"q": args["q"].float()},
        {"q": args["q"].half()},
        {"q": flat},  # not at 16 bytes
        {"q": args["q"].repeat(1, 9, 1)},  # nine query heads a KV head
        {"k_cache": args["k_cache"].transpose(1, 2), "v_cache": args["v_cache"].transpose(1, 2)},
        {"block_tables": args["block_tables"].long()},
        {"score_mods": ScoreMods(softcap=30.0)},
        {"score_mods": ScoreMods(alibi_slopes=torch.ones(4, device="cuda"))},
    ):
        assert not serves_part(args | change), list(change)


def test_a_cpu_is_not_served() -> None:
    args = _arguments([(1, 20), (1, 150)], device="cpu")
    assert not serves_part(args)
    assert "GPU" in str(paged_decode16.unavailable_reason("cpu"))
