"""qkv_rope_cache.cu on a CPU, launched by its own Python, against float64: workers that lay columns
down and finishers that turn and store them, tiles over the edges, more tiles than pairs of
blocks."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from modelmill.ops import registry
from modelmill.ops.cuda.gemm_16bit import qkv_rope_cache
from modelmill.ops.rope_cache import RopeCacheInputs, rope_cache
from tests.ops.emulation.cases import mistakes
from tests.ops.emulation.emulator import Emulator, memory_ranges, requires_emulation

slow = pytest.mark.slow
pytestmark = requires_emulation
BF, HF = torch.bfloat16, torch.float16
# of the whole, in the norm: the projection's own rounding and the output's
LIMIT = {BF: 4e-3, HF: 6e-4}


class Case(NamedTuple):
    """size: tokens, columns of x, heads, KV heads, size of a head."""

    size: tuple[int, int, int, int, int]
    dtype: torch.dtype = BF
    biased: bool = False
    turned: bool = True
    scaled: bool = False
    page: int = 16
    multiprocessors: int = 2


def make_args(case: Case) -> dict[str, Any]:
    """Arguments; an x inside a wider tensor, pages in shuffled order with more between them, slots
    that are none.
    """
    tokens, columns, heads, kv_heads, dim = case.size
    generator = torch.Generator().manual_seed(tokens)
    x = torch.full((tokens, columns + 24), float("nan")).to(case.dtype)[:, :columns]
    x[:] = torch.randn(tokens, columns, generator=generator)
    rows, pages = (heads + 2 * kv_heads) * dim, -(-tokens // case.page) + 1
    slots = torch.randperm(pages * case.page, generator=generator)[:tokens]
    slots[::7] = -1
    angle = torch.randn(tokens, dim // 2, generator=generator) * 3
    caches = [
        torch.full((pages, 2, kv_heads, case.page, dim), 7.0).to(case.dtype)[:, 1] for _ in range(2)
    ]
    return {
        "x": x,
        "weight": (torch.randn(rows, columns, generator=generator) / 8).to(case.dtype),
        "bias": torch.randn(rows, generator=generator).to(case.dtype) if case.biased else None,
        "k_cache": caches[0],
        "v_cache": caches[1],
        "slots": slots,
        "heads": heads,
        "cos": angle.cos() if case.turned else None,
        "sin": angle.sin() if case.turned else None,
        "q_scale": torch.linspace(0.5, 2.0, tokens) if case.scaled else None,
    }


def error(emulator: Emulator, case: Case) -> float:
    """The largest of queries, keys and values."""
    emulator.num_sms = case.multiprocessors
    args = make_args(case)
    # the kernel in front still writes what a row needs, and reads where the queries go
    row = [args[name] for name in ("cos", "sin", "q_scale", "slots")]
    size = case.size[0] * case.size[2] * case.size[4] * case.dtype.itemsize
    emulator.preceding_writes = lambda _, arguments: [
        *memory_ranges(*row),
        (int.from_bytes(arguments[2][8:16], "little"), size),
    ]
    q = registry.adapt_to_named_args("qkv_rope_cache", qkv_rope_cache.run)(**args)
    projected = args["x"].double() @ args["weight"].double().T
    if args["bias"] is not None:
        projected = projected + args["bias"].double()
    caches = {name: torch.full_like(args[name], 7.0) for name in ("k_cache", "v_cache")}
    rest = {name: args[name] for name in ("slots", "heads", "cos", "sin", "q_scale")}
    expected = rope_cache(projected.to(case.dtype), RopeCacheInputs(**caches, **rest))
    pairs = ((q, expected), *((args[name], caches[name]) for name in caches))
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


@pytest.mark.parametrize(
    "case",
    [
        Case((140, 136, 2, 1, 128), biased=True, scaled=True),
        Case((300, 264, 3, 1, 64), HF),
        pytest.param(Case((300, 584, 1, 2, 128), HF, biased=True, multiprocessors=5), marks=slow),
        pytest.param(Case((1, 64, 1, 1, 64), biased=True), marks=slow),
        pytest.param(Case((257, 72, 4, 4, 128), turned=False, scaled=True), marks=slow),
        pytest.param(Case((520, 1096, 5, 1, 128), page=32, multiprocessors=3), marks=slow),
        pytest.param(
            Case((600, 200, 7, 2, 64), HF, biased=True, scaled=True, multiprocessors=4), marks=slow
        ),
    ],
    ids=str,
)
def test_queries_keys_and_values(emulator: Emulator, case: Case) -> None:
    assert error(emulator, case) < LIMIT[case.dtype]
    assert [name for name, _ in emulator.launched] == ["qkv_rope_cache"]


MISTAKES = {
    "rows not waited for": (
        "                    if (!ready) "
        "mbarrier_wait(shared_address(&epilogue_barriers.full[consumer]), parity);\n"
    ),
    "rows written over": (
        "mbarrier_wait(shared_address(&epilogue_barriers.empty[consumer]), parity ^ 1);\n"
    ),
    "workers not told": (
        "if (lane == 0) mbarrier_arrive(shared_address(&epilogue_barriers.empty[consumer]));"
    ),
    "a bias not waited for": (
        "mbarrier_wait(shared_address(&epilogue_barriers.bias_full[consumer]), bias_parity);\n"
    ),
    "rows left out": ("at += EPILOGUE_WARPS", "at += 2 * EPILOGUE_WARPS"),
    "what has no place is stored": ("slot < 0 ? -1 : page", "slot < 0 ? 0 : page"),
    "the last row forgotten": ("bool valid = row < work", "bool valid = row + 1 < work"),
    "both parts to one place": ("at / 2 * 16 + part * 8", "at / 2 * 16"),
    "values turned": ("if (value < 0 && work.cos", "if (value <= 0 && work.cos"),
    "columns taken for others": ("from + (chunk << 4 ^ swizzle)", "from + (chunk << 4)"),
    "angles and places that are not there yet": (
        "    pdl_wait(); // the previous kernel may read the pages and write the angles\n"
    ),
    "a bias written over": "        named_barrier_sync(1 + consumer, 128);\n",
    "a key beside a query without its place": (
        "if (head + 1 < work.heads) return;",
        "inputs.offset = -1;\n    if (head < work.heads) return;",
    ),
}


@pytest.mark.parametrize("change", mistakes(MISTAKES))
def test_the_emulation_sees_mistakes(emulator: Emulator, change: tuple[str, str]) -> None:
    case = Case((300, 64, 3, 1, 128), biased=True)
    assert emulator.detects(change, lambda: error(emulator, case) < LIMIT[BF])
