"""The CPU kernels beyond what every variant is asked: each instruction set, odd memory, bits in
batches, the build.
"""

from __future__ import annotations

import fcntl
import functools
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.core import env
from modelmill.core.errors import MissingDependency
from modelmill.ops import int8_group_linear, registry, rptq_quant
from modelmill.ops.case import Case, randn
from modelmill.ops.cpu.common import build, prebuilt
from modelmill.ops.cpu.common.gemm import load_gemm_function
from modelmill.ops.int4_linear import random_weight
from modelmill.ops.int8_linear import quantize
from modelmill.ops.paged_attention import PagedAttentionInputs
from modelmill.ops.quant_types import quantize_per_row
from modelmill.ops.rope_cache import RopeCacheInputs
from modelmill.ops.rptq_linear import RptqLinearInputs
from modelmill.ops.rptq_quant import RptqQuantInputs
from modelmill.ops.w8a8_linear import Linear8BitInputs
from tests.hypothesis_examples import is_quick

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# To compile quickly: 26 instead of 55 s of a core for three libraries. -O1 sees more of what an
# optimiser makes of undefined behaviour.
LESS_OPTIMISED = "-O0" if is_quick() else "-O1"
# What is added to the flags, and the floats in a vector that must come of it.
INSTRUCTION_SETS = {
    "native": ((), None),
    "avx2": (("-mno-avx512f", LESS_OPTIMISED), 8),
    "plain": (("-mno-avx", LESS_OPTIMISED), 4),
}
QUICK = ("-O0", "-std=c++17", "-fPIC", "-Wall", "-Wextra", "-Werror")
KERNELS: dict[str, ModuleType] = {
    op: by_backend["cpu"]
    for op, declared in registry.op_declarations().items()
    if not declared.fuses and "cpu" in (by_backend := registry.implementations(op))
}
# words in the names of cases
LEFT_TO_THE_REFERENCE = {"quantize": ("fp8", "order", "groups"), "router_gemm": ("20x160",)}
# kernels that write in place or read tables, pages or angles where they are
NEEDS_PACKED = (
    "add_rms_norm",
    "causal_conv",
    "fused_topk",
    "gated_delta_rule",
    "gated_rms_norm",
    "int4_fused_moe",
    "int8_fused_moe",
    "mxfp4_fused_moe",
    "paged_attention",
    "rope_cache",
    "router_gemm",
    "rptq_quant",
    "sigmoid_mul",
    "ssd_scan",
)

pytestmark = pytest.mark.skipif(
    build.unavailable_reason("cpu") is not None, reason=str(build.unavailable_reason("cpu"))
)


def _forget() -> None:
    """Drop every function that the bindings, and what they share, hold of the library in use."""
    for module in [
        module_name
        for name, module_name in sys.modules.items()
        if name.startswith("modelmill.ops.cpu.")
    ]:
        for value in vars(module).values() if module is not build else ():
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()


@functools.cache
def _library(name: str) -> build.KernelLibrary:
    flags, width = INSTRUCTION_SETS[name]
    native = build.load_or_compile_library()
    if name == "avx2" and not isinstance(native, str) and native.vector_width == width:
        return native  # the same instructions: half a minute of compilation less
    library = build.load_and_verify_library(
        build.compile_library_if_missing((*build.native_compiler_flags(), *flags))
    )
    assert width is None or library.vector_width <= width
    return library


def _use(library: build.KernelLibrary, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With freshly allocated tensors full of NaN."""
    monkeypatch.setattr(build, "load_or_compile_library", lambda: library)
    _forget()
    torch.use_deterministic_algorithms(True, warn_only=True)  # makes torch.empty fill with NaN
    yield
    torch.use_deterministic_algorithms(False)
    _forget()


def test_every_product_forgets_the_library_before() -> None:
    load_gemm_function("int4_linear", "ppppppqqqqii")
    assert load_gemm_function.cache_info().currsize > 0
    _forget()
    assert load_gemm_function.cache_info().currsize == 0


@pytest.fixture(params=list(INSTRUCTION_SETS))
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each test once per instruction set."""
    if request.param != "native" and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("instruction sets of x86")
    for _ in _use(_library(request.param), monkeypatch):
        yield request.param


@pytest.fixture
def other_way(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels that multiply bfloat16 in pairs where this machine's do so as floats, and the
    other way round.
    """
    if "avx512_bf16" not in build._processor_identity():
        pytest.skip("a processor without AVX512_BF16 multiplies floats only")
    flags = (
        build.NATIVE_COMPILER_FLAGS
        if "-DMILL_BF16_AS_FP32" in build.native_compiler_flags()
        else (*build.NATIVE_COMPILER_FLAGS, "-DMILL_BF16_AS_FP32")
    )
    yield from _use(
        build.load_and_verify_library(build.compile_library_if_missing((*flags, LESS_OPTIMISED))),
        monkeypatch,
    )


def _odd(tensor: torch.Tensor) -> torch.Tensor:
    """The same values one element into a larger buffer: aligned to nothing but the element."""
    flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return flat[1:].view(tensor.shape).copy_(tensor)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with a gap after each."""
    return torch.stack((tensor, tensor), -1)[..., 0]


@functools.cache
def _selected_ops() -> registry.Ops:
    return registry.select_backends("cpu")


def _check(
    op: str,
    args: dict[str, Any],
    dtype: torch.dtype,
    writes: tuple[str, ...] = (),
    *,
    served: bool = True,
) -> None:
    """The op as a CPU selects it against the reference on float64 copies, by the op's own
    tolerance; what it writes as well.

    served: whether the kernel must serve these arguments, or must leave them to the reference.
    """
    assert registry.backend_serves_args(op, "cpu", **args) is served
    wide = {
        n: (v.double() if v.is_floating_point() else v.clone())
        if isinstance(v, torch.Tensor)
        else v
        for n, v in args.items()
    }
    wide.update({n: wide[n] for n in writes})
    expected = registry.adapt_to_named_args(op, registry.reference(op))(**wide)
    outputs = registry.adapt_to_named_args(op, getattr(_selected_ops(), op))(**args)
    pairs = list(zip(outputs, expected)) if isinstance(outputs, tuple) else [(outputs, expected)]
    pairs += [(args[n], wide[n]) for n in writes]
    for actual, truth in pairs:
        if truth is None:  # a scale that the caller knows
            assert actual is None
            continue
        assert actual.shape == truth.shape
        actual, truth = actual.double(), truth.double()
        assert torch.equal(actual.isnan(), truth.isnan())
        error = ((actual - truth).abs() / truth.abs().clamp(min=1.0)).nan_to_num()
        assert float(error.max()) <= import_module(f"modelmill.ops.{op}").TOLERANCE[dtype]


def _caches(op: str) -> tuple[str, ...]:
    return ("k_cache", "v_cache") if op == "rope_cache" else ()


def _is_served(op: str, case: Case) -> bool:
    """Whether the kernel serves a case of its op."""
    return not any(word in case.name for word in LEFT_TO_THE_REFERENCE.get(op, ()))


def _cases(op: str, dtype: torch.dtype) -> Iterator[Case]:
    yield from (
        c
        for c in import_module(f"modelmill.ops.{op}").cases("cpu", dtype)
        if c.bytes_moved < 1 << 22
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", KERNELS)
def test_every_instruction_set_computes_the_reference(
    op: str, dtype: torch.dtype, isa: str
) -> None:
    for case in _cases(op, dtype):
        _check(op, dict(case.args), dtype, _caches(op), served=_is_served(op, case))


@pytest.mark.parametrize("change", [_odd, _strided], ids=["odd offsets", "gaps"])
@pytest.mark.parametrize("op", KERNELS)
def test_memory_as_it_comes(op: str, change: Any) -> None:
    for dtype in DTYPES:
        for case in list(_cases(op, dtype))[:3]:
            args = {
                n: change(v) if isinstance(v, torch.Tensor) else v for n, v in case.args.items()
            }
            served = _is_served(op, case) and (change is _odd or op not in NEEDS_PACKED)
            _check(op, args, dtype, _caches(op), served=served)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40) | st.sampled_from((97, 130)),
    k=st.integers(1, 300),
    n=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
)
def test_products_of_any_size(rows: int, k: int, n: int, dtype: torch.dtype, bias: bool) -> None:
    x = randn(rows, k, device="cpu", dtype=dtype, seed=rows)
    weight = randn(n, k, device="cpu", dtype=torch.float32, seed=n, scale=k**-0.5)
    args = {"x": x, "bias": randn(n, device="cpu", dtype=dtype, seed=k) if bias else None}
    _check("linear", args | {"weight": weight.to(dtype)}, dtype)
    packed, scale = quantize(weight)
    _check("int8_linear", args | {"weight": packed, "scale": scale}, dtype)
    for group in (32, 96):
        four = random_weight(n, k, group, device="cpu", symmetric=bias) | {"group": group}
        _check("int4_linear", args | four, dtype)
        eight = int8_group_linear.random_weight(n, k, group, device="cpu", symmetric=bias) | {
            "group": group
        }
        _check("int8_group_linear", args | eight, dtype)


GROUPWISE = ("int4_linear", "int8_group_linear")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_gives_the_same_bits_alone_and_in_a_batch(dtype: torch.dtype, isa: str) -> None:
    """Many rows are torch's where vectors are narrow, and of bfloat16 where that is faster."""
    is_bf16 = dtype is torch.bfloat16
    many = isa != "plain" and not (is_bf16 and build.torch_gemm_is_faster())
    _alone_and_in((1, 2, 3, 4, 7, 16, *([17, 65] if many else [])), dtype)


def _alone_and_in(batches: tuple[int, ...], dtype: torch.dtype) -> None:
    """Many rows of bfloat16 meet weights in groups that are rounded to it: other numbers."""
    x = randn(65, 333, device="cpu", dtype=dtype, seed=1)
    weight = randn(45, 333, device="cpu", dtype=dtype, seed=2)
    packed, scale = quantize(weight)
    codes = weight.float().clamp(-4, 4).to(torch.float8_e4m3fn)
    four = random_weight(45, 333, 64, device="cpu", symmetric=False) | {"group": 64}
    eight = int8_group_linear.random_weight(45, 333, 64, device="cpu", symmetric=False) | {
        "group": 64
    }
    products: dict[str, dict[str, Any]] = {
        "linear": {"weight": weight},
        "int8_linear": {"weight": packed, "scale": scale},
        "fp8_linear": {"weight": codes, "scale": scale, "x_scale": None, "dtype": dtype},
        "int4_linear": four,
        "int8_group_linear": eight,
    }
    for op, args in products.items():
        for bias in (None, randn(45, device="cpu", dtype=dtype, seed=3)):
            run = functools.partial(
                registry.adapt_to_named_args(op, KERNELS[op].run), **args, bias=bias
            )
            alone = torch.cat([run(x=row[None]) for row in x[: max(batches)]])
            for rows in batches:
                if rows <= 16 or dtype is not torch.bfloat16 or op not in GROUPWISE:
                    assert torch.equal(run(x=x[:rows]), alone[:rows]), (op, rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bfloat16_the_other_way(dtype: torch.dtype, other_way: None) -> None:
    for op in ("linear", "int8_linear", "fp8_linear"):
        for case in _cases(op, dtype):
            _check(op, dict(case.args), dtype)
    _alone_and_in((1, 2, 3, 4, 6, 7, 13, 16), dtype)


AMD = "vendor_id\t: AuthenticAMD\n"


@pytest.mark.parametrize(
    ("cpu", "flag", "expected"),
    [
        ("vendor_id\t: GenuineIntel\nflags\t\t: avx512f avx512_bf16", "BF16_AS_FP32", True),
        (AMD + "flags\t\t: avx512f avx512_bf16", "BF16_AS_FP32", False),
        (AMD + "cpu family\t: 25\nmodel\t\t: 17", "PREFETCH_L2", True),
        (AMD + "cpu family\t: 26\nmodel\t\t: 17", "PREFETCH_L2", False),
        (AMD + "cpu family\t: 125\nmodel\t\t: 17", "PREFETCH_L2", False),
        (AMD + "cpu family\t: 25\nmodel\t\t: 17", "ROW_BY_ROW", False),
        (AMD + "cpu family\t: 26\nmodel\t\t: 2", "ROW_BY_ROW", True),
    ],
)
def test_flags_of_a_cpu(
    cpu: str, flag: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who multiplies bfloat16 as floats, and who fetches weights far ahead."""
    monkeypatch.setattr(build, "_processor_identity", lambda: cpu)
    assert (f"-DMILL_{flag}" in build.native_compiler_flags()) is expected


def _attention(
    lengths: list[tuple[int, int]],
    dtype: torch.dtype,
    cache: torch.dtype,
    window: int | None = None,
    heads: tuple[int, int] = (6, 2),
    dim: int = 48,
    page: int = 16,
) -> Any:
    pages = [-(-context // page) for _, context in lengths]
    tables = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    for b, count in enumerate(pages):
        tables[b, :count] = torch.arange(count) * len(lengths) + b
    total = max(pages) * len(lengths)
    starts = torch.tensor([0, *(q for q, _ in lengths)]).cumsum(0).to(torch.int32)
    return {
        "q": randn(int(starts[-1]), heads[0], dim, device="cpu", dtype=dtype, seed=1, scale=2.0),
        "k_cache": randn(total, heads[1], page, dim, device="cpu", dtype=cache, seed=2),
        "v_cache": randn(total, heads[1], page, dim, device="cpu", dtype=cache, seed=3),
        "block_tables": tables,
        "query_start": starts,
        "context_lens": torch.tensor([c for _, c in lengths], dtype=torch.int32),
        "max_query": max(q for q, _ in lengths),
        "max_context": max(c for _, c in lengths),
        "scale": dim**-0.5,
        "window": window,
    }


@pytest.mark.parametrize("window", [None, 1, 100, 300])
def test_attention_over_split_contexts(window: int | None, isa: str) -> None:
    lengths = [(1, 255), (1, 256), (1, 257), (1, 1000), (100, 333), (3, 700), (1, 1)]
    for dtype, cache in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)):
        _check("paged_attention", _attention(lengths, dtype, cache, window), dtype)


@pytest.mark.parametrize("dim", [1, 8, 40, 72, 80, 128, 200])
@pytest.mark.parametrize("group", range(1, 11))
def test_attention_of_few_rows(group: int, dim: int, isa: str) -> None:
    """One to some queries of one to ten heads a KV head, rows that end within a vector, pages of
    any size.
    """
    lengths = [(1, 300), (2, 65), (3, 3), (1, 64), (4, 257), (1, 1), (1, 18)]
    for dtype, page, window in zip(DTYPES, (16, 5, 1), (None, 70, 300), strict=True):
        args = _attention(lengths, dtype, dtype, window, heads=(2 * group, 2), dim=dim, page=page)
        _check("paged_attention", args, dtype)
        for name in ("k", "v"):
            wide = args[f"{name}_cache"].float()
            scale = wide.abs().amax(-1).clamp(min=1e-3) / 127
            args |= {
                f"{name}_cache": (wide / scale[..., None]).round().to(torch.int8),
                f"{name}_scale": scale,
            }
        _check("paged_attention", args, dtype)


@pytest.mark.parametrize(("heads", "dim", "value_dim"), [(4, 40, 24), (16, 80, 64), (5, 528, 512)])
def test_attention_to_latent_vectors(heads: int, dim: int, value_dim: int, isa: str) -> None:
    """Values are the first channels of the keys; the second cache is not read."""
    lengths = [(1, 300), (7, 70), (1, 17)]
    for dtype in DTYPES:
        args = _attention(lengths, dtype, dtype, None, heads=(heads, 1), dim=dim)
        args |= {"v_cache": torch.full_like(args["v_cache"], torch.nan), "value_dim": value_dim}
        _check("paged_attention", args, dtype)
        codes, scale = quantize_per_row(args["k_cache"], torch.int8)
        args |= {"k_cache": codes, "v_cache": 0 * codes, "k_scale": scale, "v_scale": 0 * scale}
        _check("paged_attention", args, dtype)


def test_keys_beyond_the_context_are_not_read(isa: str) -> None:
    args = _attention([(1, 37), (5, 21)], torch.float32, torch.float32)
    expected = KERNELS["paged_attention"].run(PagedAttentionInputs(**args))
    for name in ("k_cache", "v_cache"):
        poisoned = args[name]
        for b, context in enumerate((37, 21)):
            poisoned[args["block_tables"][b, context // 16], :, context % 16 :] = float("nan")
    assert torch.equal(KERNELS["paged_attention"].run(PagedAttentionInputs(**args)), expected)


def test_a_sequence_attends_with_the_same_bits_alone_and_in_a_batch(isa: str) -> None:
    args = _attention([(1, 700), (1, 3), (1, 700)], torch.float32, torch.float32)
    together = KERNELS["paged_attention"].run(PagedAttentionInputs(**args))
    for b in range(3):
        own = {"q": args["q"][b : b + 1], "query_start": torch.tensor([0, 1], dtype=torch.int32)}
        own |= {n: args[n][b : b + 1] for n in ("block_tables", "context_lens")}
        assert torch.equal(
            KERNELS["paged_attention"].run(PagedAttentionInputs(**(args | own)))[0], together[b]
        )


@pytest.mark.parametrize("cache", DTYPES, ids=str)
def test_the_cache_may_have_its_own_dtype(cache: torch.dtype, isa: str) -> None:
    _check("paged_attention", _attention([(1, 300), (9, 20)], torch.float32, cache), torch.float32)
    values = torch.cat(
        (randn(4096 - 9, device="cpu", dtype=torch.float32, seed=1, scale=100.0), _rough())
    )
    qkv = values.view(-1, 4 * 8)
    stored = [torch.full((9, 1, 16, 8), float("nan"), dtype=cache) for _ in range(2)]
    slots = torch.arange(128)
    slots[3] = -1
    q = KERNELS["rope_cache"].run(qkv, RopeCacheInputs(*stored, slots, 2))
    assert torch.equal(q.nan_to_num(), qkv[:, :16].view(128, 2, 8).nan_to_num())
    for tensor, part in zip(stored, (qkv[:, 16:24], qkv[:, 24:])):
        rows = tensor[:, 0].reshape(-1, 8)
        assert torch.equal(rows[:3].nan_to_num(), part[:3].to(cache).nan_to_num())
        assert torch.equal(rows[4:128].nan_to_num(), part[4:].to(cache).nan_to_num())
        assert torch.equal(rows[4:128].isnan(), part[4:].isnan())
        assert rows[3].isnan().all()
        assert rows[128:].isnan().all()


def _rough() -> torch.Tensor:
    """Values at which narrow formats round, overflow, or lose bits."""
    return torch.tensor(
        [65504.0, 65519.9, 65520.0, -1e30, 1e-5, 5.97e-8, 2.9e-8, float("inf"), float("nan")]
    )


def test_float16_values_all_survive(isa: str) -> None:
    every = torch.arange(1 << 16).to(torch.uint16).view(torch.float16).view(-1, 4 * 8)
    stored = [torch.zeros(len(every) // 16, 1, 16, 8) for _ in range(2)]
    KERNELS["rope_cache"].run(every, RopeCacheInputs(*stored, torch.arange(len(every)), 2))
    for tensor, part in zip(stored, (every[:, 16:24], every[:, 24:])):
        assert torch.equal(tensor.view(-1, 8).nan_to_num(7.0), part.float().nan_to_num(7.0))


@pytest.mark.parametrize("k", [1, 16, 19, 64])
def test_float8_values_all_survive_and_nan_is_none(k: int, isa: str) -> None:
    """As weights and as activations: each code k times, so that a row's sum is k times its
    value.
    """
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    expected = every.float() * k
    assert int(expected.isnan().sum()) == 2
    codes, one = (
        every.view(torch.uint8)[:, None].expand(256, k).contiguous().view(every.dtype),
        torch.ones(1),
    )
    run = KERNELS["fp8_linear"].run
    as_weights = run(
        Linear8BitInputs(torch.ones(1, k), codes, torch.ones(256), None, torch.float32)
    )[0]
    as_inputs = run(
        Linear8BitInputs(codes, torch.ones(1, k).to(every.dtype), one, one, torch.float32)
    )[:, 0]
    for actual in (as_weights, as_inputs):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [1, 40])
def test_steps_lengthened_for_a_token_are_the_references_to_the_bit(rows: int, isa: str) -> None:
    """Else an integer that falls to the other side would look like a fault in acceptance."""
    shapes = [(rows, 300, 32), (rows, 576, 32)]
    tried = [
        RptqQuantInputs(**case.args)
        for case in rptq_quant.cases_for_shapes(shapes, "cpu", torch.float32)
        if case.name.endswith("fallback") and not case.args["gated"]
    ]
    assert len(tried) == 3
    for inputs in tried:
        inputs = inputs._replace(x=inputs.x * torch.logspace(-2, 2, len(inputs.x))[:, None])
        (q, step), (expected, steps) = (
            KERNELS["rptq_quant"].run(inputs),
            registry.reference("rptq_quant")(inputs),
        )
        assert torch.equal(q, expected)
        assert torch.equal(step, steps)
        assert rows == 1 or bool((steps > inputs.group_step).any())


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_a_step_lengthened_for_a_token_marks_what_is_no_number(value: float, isa: str) -> None:
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    x[0, 17] = value
    order, ones = torch.arange(64, dtype=torch.int32), torch.ones(64)
    inputs = RptqQuantInputs(x, order, ones, order, 8, 32, False, torch.ones(2))
    q, step = KERNELS["rptq_quant"].run(inputs)
    assert not step[0, 0].isfinite()
    assert bool((q[0, :32] == 0).all()), "a cast of NaN is not defined"
    assert bool(step[0, 1].isfinite())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("place", [0, 17, 31])
def test_a_clusters_own_step_marks_what_is_no_number(place: int, value: float, isa: str) -> None:
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(place))
    x[0, place] = value
    order = torch.arange(64, dtype=torch.int32)
    inputs = RptqQuantInputs(x, order, None, None, 8, 32)
    (q, step), (expected, steps) = (
        KERNELS["rptq_quant"].run(inputs),
        registry.reference("rptq_quant")(inputs),
    )
    torch.testing.assert_close(step, steps, rtol=1e-6, atol=0, equal_nan=True)
    assert not steps[0, 0].isfinite()
    assert bool((q[0, :32] == 0).all()), "a cast of NaN is not defined"
    assert bool(((q.int() - expected.int()).abs() <= 1)[:, 32:].all())
    product = KERNELS["rptq_linear"].run(
        RptqLinearInputs(
            q,
            torch.ones(4, 64, dtype=torch.int8),
            torch.ones(4, 2),
            None,
            32,
            step,
            None,
            None,
            torch.float32,
        )
    )
    assert product[0].isnan().all()
    assert product[1].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations_at_the_ends_of_the_range(dtype: torch.dtype, isa: str) -> None:
    ends = [
        0.0,
        -0.0,
        1e-6,
        20.0,
        -20.0,
        87.0,
        -87.0,
        88.0,
        -88.0,
        100.0,
        -100.0,
        6e4,
        -6e4,
        float("nan"),
    ]
    x = torch.tensor([ends * 3]).to(dtype)
    _check("gelu_tanh", {"x": x}, dtype)
    _check("silu_mul", {"gate_up": torch.cat((x, torch.ones_like(x)), 1)}, dtype)


def _integers(rows: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random x [rows, K], int8 weights [N, K] and scales [N]."""
    torch.manual_seed(rows + k)
    return torch.randn(rows, k), torch.randint(-127, 128, (n, k), dtype=torch.int8), torch.rand(n)


@pytest.mark.parametrize(("rows", "k"), [(1, 576), (3, 200), (7, 130)])
def test_sums_of_near_magnitudes_are_exact(rows: int, k: int, isa: str) -> None:
    """Numbers within 2^7 of each other lose nothing: one rounding, that of the output, remains."""
    x, weight, scale = _integers(rows, k, 21)
    x = (x.clamp(-1, 1).abs() + 0.05).to(torch.bfloat16) * 2.0**-40
    scale = scale.mul(64).round().add(1).mul(2.0**30)
    actual = KERNELS["int8_linear"].run(x, weight, scale)
    exact = (x.double() @ weight.double().t()) * scale.double()
    assert torch.allclose(
        actual.double(), exact, rtol=2.0**-8, atol=float(exact.abs().max()) * 1e-6
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_large_activation_costs_its_block_16_bits_of_it(dtype: torch.dtype, isa: str) -> None:
    """The others of its 128 columns are within 2^-15 of it, and other blocks as exact as before."""
    x, weight, scale = _integers(2, 384, 16)
    x = x.to(dtype)
    x[1, 200] = 3e4
    weight[:, 200] = 0  # so that only what the others lose is seen
    actual = KERNELS["int8_linear"].run(x, weight, scale).double()
    expected = (x.double() @ weight.double().t()) * scale.double()
    lost = 3e4 * 2.0**-15 * weight[:, 128:256].double().abs().sum(1) * scale.double()
    rounding = expected.abs() * 2.0**-7 + 1e-3
    assert ((actual[1] - expected[1]).abs() <= lost + rounding[1]).all()
    assert ((actual[0] - expected[0]).abs() <= rounding[0]).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_no_number_is_marked(value: float, isa: str) -> None:
    x, weight, scale = _integers(5, 300, 9)
    weight[weight == 0] = 1
    x = x.to(torch.bfloat16)
    x[3, 290] = value
    actual = KERNELS["int8_linear"].run(x, weight, scale)
    assert not actual[3].isfinite().any()
    assert actual[[0, 1, 2, 4]].isfinite().all()


@pytest.mark.parametrize("tiny", [0.0, 1e-33, 1e-38, 1e-40])
def test_activations_near_zero(tiny: float, isa: str) -> None:
    """They lose at most half of the smallest normal float each."""
    x, weight, scale = _integers(1, 128, 8)
    actual = KERNELS["int8_linear"].run((x * tiny).to(torch.bfloat16), weight, scale)
    expected = ((x * tiny).to(torch.bfloat16).double() @ weight.double().t()) * scale.double()
    lost = weight.double().abs().sum(1).max() * 2.0**-127
    assert torch.allclose(actual.double(), expected, rtol=2.0**-7, atol=float(lost))


def test_empty_batches() -> None:
    empty = torch.zeros(0, 64)
    assert KERNELS["linear"].run(empty, torch.zeros(5, 64)).shape == (0, 5)
    assert KERNELS["int8_linear"].run(
        empty, torch.zeros(5, 64, dtype=torch.int8), torch.ones(5)
    ).shape == (0, 5)
    assert KERNELS["rms_norm"].run(empty, torch.ones(64), 1e-5).shape == (0, 64)
    assert KERNELS["silu_mul"].run(empty).shape == (0, 32)
    assert KERNELS["gelu_tanh"].run(empty).shape == (0, 64)


SCRIPT = f"""
import torch
from modelmill.ops.cpu.common import build
started = []
execute = build._run_compiler
build._run_compiler = lambda command: (started.append(command), execute(command))
library = build.load_and_verify_library(build.compile_library_if_missing({QUICK!r}))
torch.set_num_threads(2)
torch.randn(2000, 2000) @ torch.randn(2000, 200)
library.with_gil.modelmill_self_check()
maps = open("/proc/self/maps").read().split()
print(library.path, len({{m for m in maps if "omp" in m.rsplit("/", 1)[-1] and ".so" in m}}))
print(len(started))
"""


def test_two_processes_may_build_at_once_and_share_torchs_threads(tmp_path: Path) -> None:
    variables = env.child_process_env() | {
        "MODELMILL_CACHE": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-c", SCRIPT]
    running = [
        subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate()[0].split() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert outputs[0][:2] == outputs[1][:2]
    assert min(int(output[2]) for output in outputs) == 0  # one compiles, the other waits
    assert [path.name for path in (tmp_path / "cpu").iterdir()] == [Path(outputs[0][0]).name]
    if sys.platform == "linux":
        assert outputs[0][1] == "1"  # one OpenMP runtime in the process: torch's


def test_a_stopped_process_holds_up_no_other_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "LOCK_TIMEOUT_SECONDS", 0.0)
    stopped = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        with build._compile_lock(tmp_path):
            fcntl.flock(stopped, fcntl.LOCK_UN)
        with build._compile_lock(tmp_path), pytest.raises(BlockingIOError):
            fcntl.flock(stopped, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(stopped)


def test_another_processor_flag_or_compiler_is_another_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = build._library_key(QUICK, "g++", "12")
    assert key == build._library_key(QUICK, "g++", "12")
    others = {
        build._library_key((*QUICK, "-g"), "g++", "12"),
        build._library_key(QUICK, "g++", "13"),
    }
    monkeypatch.setattr(build, "_processor_identity", lambda: "another processor")
    assert len(others | {key, build._library_key(QUICK, "g++", "12")}) == 4


def _reason() -> str:
    with pytest.MonkeyPatch.context() as compiling:  # whatever kernels these tests run with
        compiling.setenv("MODELMILL_CPU_KERNELS", "native")
        reason = build.load_or_compile_library.__wrapped__()
    assert isinstance(reason, str)
    assert "\n" not in reason
    return reason


def test_without_a_compiler_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "cxx_from_env", lambda: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    reason = _reason()
    assert "install g++" in reason
    monkeypatch.setattr(build, "load_or_compile_library", lambda: reason)
    assert build.unavailable_reason("cpu") == reason
    chosen = dict(registry.select_backends("cpu").backends)
    assert chosen.pop("argmax") == "cpu"  # numpy serves it
    assert set(chosen.values()) == {"torch"}
    with pytest.raises(MissingDependency, match="install g"):
        build.load_function("linear", "p")


@pytest.mark.parametrize(
    ("machine", "brought", "helps"),
    [("x86_64", False, True), ("x86_64", True, False), ("riscv64", False, False)],
)
def test_the_way_out_names_the_wheel_where_one_helps(
    machine: str, brought: bool, helps: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(env, "cxx_from_env", lambda: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(prebuilt, "PREBUILT_FOLDER", tmp_path if brought else tmp_path / "absent")
    assert ("wheel" in _reason()) is helps


def test_a_named_compiler_that_is_absent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "cxx_from_env", lambda: "no-such-compiler")
    assert "'no-such-compiler'" in _reason()


def test_a_failing_compile_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(env, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(build, "NATIVE_COMPILER_FLAGS", ("--no-such-flag",))
    assert "no-such-flag" in _reason()
    assert list((tmp_path / "cpu").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(env, "cache_dir", lambda: tmp_path / "file")
    assert "cannot be written" in _reason()


def test_a_broken_library_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kernels.so").write_bytes(b"not a library")
    monkeypatch.setattr(build, "compile_library_if_missing", lambda flags: tmp_path / "kernels.so")
    assert "cannot be loaded" in _reason()


def test_other_devices_are_refused() -> None:
    assert "CPU" in str(build.unavailable_reason("cuda"))
