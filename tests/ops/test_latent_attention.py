"""Attention to latent vectors (MLA): by its formula, in each kernel that serves it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from modelmill.ops import registry
from modelmill.ops.bound_op import CachedOpBinding
from modelmill.ops.case import Case
from modelmill.ops.paged_attention import PagedAttentionInputs, latent_case, paged_attention
from modelmill.ops.quant_types import quantize_per_row
from modelmill.ops.triton.attention import paged_latent
from tests.nn.test_latent_attention import LENGTHS, make_core, make_step, queries

MIXED = [(1, 150), (5, 140), (1, 1), (3, 3)]
PAGES = (None, torch.int8, torch.float8_e4m3fn)
INT8 = torch.int8


def inputs_of(case: Case, pages: torch.dtype | None = None) -> PagedAttentionInputs:
    """The inputs of a case; ``pages``: the dtype of quantized ones."""
    inputs = PagedAttentionInputs(**case.args)
    if pages is None:
        return inputs
    codes, scale = quantize_per_row(inputs.k_cache, pages)
    return inputs._replace(k_cache=codes, v_cache=codes, k_scale=scale, v_scale=scale)


def small(
    lengths: list[tuple[int, int]], heads: int = 6, dims: tuple[int, int] = (40, 24),
    dtype: torch.dtype = torch.float32, pages: torch.dtype | None = None, device: str = "cpu",
) -> PagedAttentionInputs:  # fmt: skip
    return inputs_of(latent_case("", heads, dims, lengths, device, dtype, 7), pages)


def by_definition(inputs: PagedAttentionInputs) -> torch.Tensor:
    """Query by query in float64: [T, heads·value_dim]."""
    rows, size = [], inputs.k_cache.shape[2]
    contexts, starts = inputs.context_lens.tolist(), inputs.query_start.tolist()
    for b, (first, end) in enumerate(itertools.pairwise(starts)):
        tokens = torch.arange(contexts[b], device=inputs.q.device)
        page, at = inputs.block_tables[b][tokens // size].long(), tokens % size
        keys = inputs.k_cache.double()[page, 0, at]
        if inputs.k_scale is not None:
            keys = keys * inputs.k_scale.double()[page, 0, at][:, None]
        for row in range(first, end):
            visible = keys[: contexts[b] - (end - 1 - row)]
            weights = (inputs.q[row].double() @ visible.T * inputs.scale).softmax(-1)
            rows.append((weights @ visible[:, : inputs.value_dim]).flatten())
    return torch.stack(rows)


def interpreted() -> Any:
    module = registry.implementations("paged_attention")["triton"]
    if module.unavailable_reason("cpu") is not None:
        pytest.skip("Triton's interpreter is off")
    return module


def tolerance(inputs: PagedAttentionInputs) -> float:
    return {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[inputs.q.dtype]


def assert_close(actual: torch.Tensor, inputs: PagedAttentionInputs) -> None:
    error = (actual.double() - by_definition(inputs)).abs().max()
    assert float(error) < tolerance(inputs)


def test_the_reference_follows_the_definition() -> None:
    """Values are channels of the keys; the second cache is not read."""
    for pages in PAGES:
        inputs = small(MIXED, pages=pages)
        poisoned = inputs._replace(v_cache=torch.full_like(inputs.k_cache.float(), torch.nan))
        assert_close(paged_attention(poisoned), inputs)


@pytest.mark.parametrize("pages", PAGES, ids=str)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_triton_follows_the_definition(
    dtype: torch.dtype, splits: int, pages: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of prompts and single queries, whole and in splits, of which some are empty."""
    module = interpreted()
    monkeypatch.setattr(paged_latent, "_num_splits", lambda *_: splits)
    inputs = small(MIXED, dtype=dtype, pages=pages)
    assert_close(module.run(inputs), inputs)


@pytest.mark.parametrize(
    ("dtype", "pages"),
    [(torch.bfloat16, torch.int8), (torch.float16, torch.float8_e4m3fn)],
    ids=["int8", "fp8"],
)
def test_tiles_of_wgmma_multiply_queries_as_they_are_loaded(
    dtype: torch.dtype, pages: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of more than a tile; 8-bit keys become of the queries' dtype."""
    module = interpreted()
    monkeypatch.setattr(paged_latent, "has_wgmma", lambda _: True)
    inputs = small([(3, 70)], 24, (48, 32), dtype, pages=pages)
    assert (
        paged_latent._select_latent_launch_config(*inputs[:2], inputs.max_query).rows
        == paged_latent.WGMMA_TILE_ROWS
    )
    assert_close(module.run(inputs), inputs)


@pytest.mark.parametrize(("heads", "dims"), [(20, (80, 64)), (3, (48, 32)), (17, (576, 512))])
def test_triton_takes_any_number_of_heads(heads: int, dims: tuple[int, int]) -> None:
    """Tiles with rows of several queries, or with some of the heads; split by itself."""
    module = interpreted()
    for lengths in ([(1, 130)], [(4, 70)]):
        inputs = small(lengths, heads, dims, torch.float16)
        assert_close(module.run(inputs), inputs)


def test_padding_and_what_lies_beyond_the_context_have_no_influence() -> None:
    module = interpreted()
    inputs = small([(1, 37), (1, 5), (1, 20)])
    lengths = torch.tensor([37, 0, 20], dtype=torch.int32)
    for b, context in enumerate((37, 5, 20)):
        page = int(inputs.block_tables[b, context // 16])
        inputs.k_cache[page, :, context % 16 :] = torch.nan
    actual, expected = module.run(inputs._replace(context_lens=lengths)), by_definition(inputs)
    assert (actual[[0, 2]] - expected[[0, 2]]).abs().max() < 1e-5
    assert not actual[1].any()


@pytest.mark.parametrize("splits", [1, 2])
def test_each_phase_leaves_the_rows_of_the_other_alone(
    splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreted()
    monkeypatch.setattr(paged_latent, "_num_splits", lambda *_: splits)
    inputs = small(MIXED)
    single = [0, 6]
    prompts = [row for row in range(len(inputs.q)) if row not in single]
    empty = torch.full((len(inputs.q), 6 * 24), torch.nan)
    decoded = paged_latent.decode(inputs, empty.clone())
    assert decoded[prompts].isnan().all()
    assert not decoded[single].isnan().any()
    prefilled = paged_latent.prefill(inputs, empty.clone(), mixed=True)
    assert prefilled[single].isnan().all()
    assert not prefilled[prompts].isnan().any()


def test_splits_of_single_queries_take_no_memory_for_the_prompt_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interpreted()
    monkeypatch.setattr(paged_latent, "_num_splits", lambda *_: 3)
    inputs, sizes, empty = small([(1, 150), (40, 40)]), [], torch.empty
    out = empty(41, 6 * 24)

    def recorded(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
        sizes.append(torch.Size(shape).numel())
        return empty(shape, **options)

    monkeypatch.setattr(torch, "empty", recorded)
    paged_latent.decode(inputs, out)
    assert sizes == [2 * 6 * 3 * 24, 2 * 6 * 3 * 2]


def test_what_the_kernels_have_no_tiles_for_goes_to_the_reference() -> None:
    interpreted()
    served = small([(1, 5)])
    assert registry.backend_serves_args("paged_attention", "triton", served)
    wide = small([(1, 5)], dims=(656, 576))
    assert not registry.backend_serves_args("paged_attention", "triton", wide)
    assert not registry.backend_serves_args("paged_attention", "triton", served._replace(window=3))


def test_a_binding_distinguishes_latent_attention_to_the_same_pages() -> None:
    op, binding = registry.select_backends("cpu").paged_attention, CachedOpBinding()
    latent = small(MIXED)
    plain = latent._replace(value_dim=None)
    for inputs in (latent, plain, latent):
        torch.testing.assert_close(binding(op, inputs), paged_attention(inputs))


def test_triton_computes_expanded_and_absorbed_the_same() -> None:
    """The keys and values of each head are in pages of one token."""
    run, core, step = interpreted().run, make_core(), make_step(LENGTHS)
    q = queries(step)
    step = replace(step, ops=step.ops.replace({"paged_attention": run}))
    absorbed, expanded = core(q, step), core(q, replace(step, num_decodes=3))
    torch.testing.assert_close(expanded, absorbed, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("pages", PAGES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [16, 128], ids=["V2-Lite", "V3"])
def test_real_sizes_on_a_gpu(heads: int, dtype: torch.dtype, pages: torch.dtype | None) -> None:
    """Decode alone and of a batch, a chunk with history, a mixed step; as a CUDA graph, too."""
    op = registry.select_backends("cuda").paged_attention
    for lengths in ([(1, 5000)], [(1, 700), (1, 1), (1, 2049)] * 8, [(300, 1000)],
                    [(40, 40), (1, 900), (2, 70)]):  # fmt: skip
        inputs = small(lengths, heads, (576, 512), dtype, pages, "cuda")
        if not registry.backend_serves_args("paged_attention", "triton", inputs):
            pytest.skip("this GPU has no conversion of fp8")
        assert_close(op(inputs), inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = op(inputs)
        inputs.q.copy_(inputs.q.flip(0))
        graph.replay()
        assert_close(replayed, inputs)
