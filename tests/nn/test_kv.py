"""The 8-bit KV cache: what it holds, what it costs, and that a loop answers from it."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from modelmill.accept.teacher_forced_scorer import TeacherForcedScorer
from modelmill.core.config import RunConfig
from modelmill.core.errors import UsageError
from modelmill.nn.kv import KVCache, ModelKVCacheSpec, kv_cache_dtype
from modelmill.ops.quant_types import QUANT_MAX, quantize_per_row
from tests.runtime import tiny

SHAPE = ModelKVCacheSpec(layers=3, kv_heads=2, head_dim=64)
QUANTIZED_DTYPES = ("int8", "fp8")
PAGES, PAGE = Path("/proc/self/pagemap"), mmap.PAGESIZE


@pytest.mark.parametrize("name", ["auto", *QUANTIZED_DTYPES])
def test_a_page_costs_what_is_allocated(name: str) -> None:
    dtype = kv_cache_dtype(name, torch.bfloat16)
    cache = KVCache.allocate(SHAPE, 5, 16, dtype, "cpu")
    assert cache.nbytes == 5 * SHAPE.page_bytes(16, dtype)
    assert all(scale is None for scale in cache.scales(1)) == (name == "auto")
    if name != "auto":
        assert SHAPE.page_bytes(16, dtype) == 2 * 3 * 2 * 16 * (64 + 4)


@pytest.mark.parametrize("name", ["auto", *QUANTIZED_DTYPES])
def test_layers_of_several_sizes_cost_what_each_takes(name: str) -> None:
    shape = ModelKVCacheSpec(layers=3, kv_heads=2, head_dim=64, sizes=((4, 16), (2, 64), (4, 16)))
    dtype = kv_cache_dtype(name, torch.bfloat16)
    cache = KVCache.allocate(shape, 5, 16, dtype, "cpu")
    assert [tuple(keys.shape) for keys in cache.k] == [
        (5, 4, 16, 16),
        (5, 2, 16, 64),
        (5, 4, 16, 16),
    ]
    assert [each.shape for each in cache.v] == [each.shape for each in cache.k]
    assert cache.nbytes == 5 * shape.page_bytes(16, dtype)
    assert shape.layer_kv_sizes == shape.sizes
    assert SHAPE.layer_kv_sizes == ((2, 64),) * 3


@pytest.mark.parametrize("name", ["auto", *QUANTIZED_DTYPES])
@pytest.mark.parametrize("full", [(1, 32), (1, 64), (1, 16)])
def test_pages_of_groups_whose_layers_differ_are_apart(full: tuple[int, int], name: str) -> None:
    """Each layer writes all of its pages; a page of the pool is one group's, and no other's."""
    windows = (5, 5, None, 5, None)
    sizes = tuple((2, 16) if window else full for window in windows)
    shape = ModelKVCacheSpec(
        5, 2, 16, sizes=sizes, layer_windows=windows, caches=(0, 1, 2, 3, 4, 3, 4)
    )
    shape = shape.with_page_groups(1000)
    dtype = kv_cache_dtype(name, torch.float32)
    count = len(shape.groups)
    cache = KVCache.allocate(shape, 3 * count, 8, dtype, "cpu")
    assert cache.num_pages_per_layer == 3 * count
    assert cache.nbytes == cache.num_pages_per_layer * shape.page_bytes(8, dtype)
    assert [tuple(each.shape[1:]) for each in cache.k] == [(h, 8, dim) for h, dim in sizes]
    group_of = cache.layer_groups[:5]
    assert cache.layer_groups[5:] == group_of[3:]

    def pages(group: int) -> list[int]:  # as its page tables name them
        return [
            page * shape.page_id_strides[group]
            for page in range(group, cache.num_pages_per_layer, count)
        ]

    sides = (cache.k, cache.v, cache.k_scale, cache.v_scale)
    written = [pair for side in sides if side for pair in zip(side, group_of, strict=True)]
    for value, (tensor, group) in enumerate(written, 1):
        tensor[pages(group)] = value
    for value, (tensor, group) in enumerate(written, 1):
        assert (tensor[pages(group)].float() == value).all()
    used = sum(tensor[pages(group)].numel() for tensor, group in written)
    assert sum(int(each.float().count_nonzero()) for each in cache.tensors) == used


@pytest.mark.skipif(not PAGES.exists(), reason="only Linux tells which pages are backed by memory")
@pytest.mark.parametrize("name", ["auto", *QUANTIZED_DTYPES])
def test_pages_in_ram_are_backed_by_memory_once_they_are_written(name: str) -> None:
    """A gigabyte is there at once: zeros are not written where the system hands out zeros."""
    dtype = kv_cache_dtype(name, torch.bfloat16)
    cache = KVCache.allocate(SHAPE, (1 << 30) // SHAPE.page_bytes(16, dtype), 16, dtype, "cpu")
    assert all(tensor.data_ptr() % 64 == 0 for tensor in cache.tensors), "as torch's own"
    for tensor in cache.tensors:
        assert _backed(tensor) < 0.05
        assert not tensor[-1].float().any()
        tensor[-1] = 1
        assert 0 < _backed(tensor) < 0.25
    assert not any(tensor[-2].float().any() for tensor in cache.tensors), "each has its own memory"


def _backed(tensor: torch.Tensor) -> float:
    """Share of a tensor's pages that are in memory."""
    first, last = tensor.data_ptr() // PAGE, (tensor.data_ptr() + tensor.nbytes - 1) // PAGE
    with PAGES.open("rb") as pages:
        pages.seek(8 * first)
        entries = np.frombuffer(pages.read(8 * (last - first + 1)), np.uint64)
    return float((entries >> np.uint64(63)).mean())


@pytest.mark.parametrize("dtype", list(QUANT_MAX))
def test_rows_come_back_within_half_a_step(dtype: torch.dtype) -> None:
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    x[3], x[4, 5], x[6] = 0.0, 1e4, x[6] * 1e-5
    values, scale = quantize_per_row(x, dtype)
    assert values.dtype is dtype
    assert scale.dtype is torch.float32
    assert bool((scale > 0).all())
    back = values.float() * scale[:, None]
    # e4m3 has 3 bits behind the point: half of the last is 1/16 of the value, or half the smallest
    # step of the type
    step = (
        scale[:, None] * 0.5
        if dtype is torch.int8
        else (x.abs() / 16).clamp(min=scale[:, None] * 2.0**-10)
    )
    assert bool(((back - x).abs() <= step * 1.001).all())
    assert bool((values.float().abs().amax(-1)[x.abs().amax(-1) > 1e-6] == QUANT_MAX[dtype]).all())


def test_halves_go_to_the_even_number() -> None:
    values, scale = quantize_per_row(torch.tensor([[127.0, 0.5, 1.5, -2.5, 3.5]]), torch.int8)
    assert scale.item() == 1.0
    assert values.tolist() == [[127, 0, 2, -2, 4]]


@pytest.mark.parametrize("name", QUANTIZED_DTYPES)
def test_loop_runs_on_8_bit_pages(name: str) -> None:
    """Many sequences at once, with shared prefixes, forks and preemption, answer as each does
    alone.
    """
    pages = tiny.decoder().kv.page_bytes(8, kv_cache_dtype(name, torch.float32)) * 25
    engine = tiny.make_engine(kv_cache_dtype=name, kv_cache_bytes=pages)
    assert engine.model_runner.kv.k[0].dtype is kv_cache_dtype(name, torch.float32)
    options = tiny.params(n=2, temperature=0.8, seed=3)
    todo = [*tiny.requests(tiny.prompts(4), options)]
    together = tiny.run(engine, todo)
    assert together == tiny.run_one_by_one(
        tiny.make_engine(kv_cache_dtype=name, kv_cache_bytes=pages), todo
    )
    assert engine.model_runner.kv.k_scale[1].count_nonzero() > 0


@pytest.mark.parametrize("name", QUANTIZED_DTYPES)
def test_copied_pages_bring_their_scales(name: str) -> None:
    runner = tiny.make_engine(kv_cache_dtype=name, kv_cache_bytes=1 << 16).model_runner
    for seed, t in enumerate(runner.kv.tensors):
        t.copy_(torch.randn(t.shape, generator=torch.Generator().manual_seed(seed)) * 50)
    runner.copy_pages([(1, 3), (2, 0)])
    for t in runner.kv.tensors:
        assert torch.equal(t[3].float(), t[1].float())
        assert torch.equal(t[0].float(), t[2].float())


def test_logits_stay_near_those_of_full_pages() -> None:
    ids = [list(p) for p in tiny.prompts(3, low=20)]
    full = TeacherForcedScorer(tiny.make_engine()).compute_logits(ids, decode_from=10)
    for name, most in (("int8", 0.05), ("fp8", 0.3)):
        near = TeacherForcedScorer(tiny.make_engine(kv_cache_dtype=name)).compute_logits(
            ids, decode_from=10
        )
        error = max(float((a - b).abs().max()) for a, b in zip(near, full))
        assert 0 < error < most * max(float(a.abs().max()) for a in full)


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(
        UsageError, match="--kv-cache-dtype 'int4' is not one of auto, activations, int8, fp8"
    ):
        RunConfig(kv_cache_dtype="int4")
