"""Each implementation in the registry against the op's reference in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

import pytest
import torch

from modelmill.eval.large_op_cases import LARGE_CASE_MAKERS
from modelmill.ops import latent_rope_cache, qkv_rope_cache, registry
from modelmill.ops.case import Case, randn
from modelmill.ops.quant_types import quantize_per_row
from modelmill.ops.recurrent_metadata import RecurrentStepMetadata
from tests.ops.paged_batches import ragged_inputs

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INTERPRETED_AT_MOST = (
    200_000  # input and output elements: the interpreter runs programs one after another
)
SEEDS = (0, 1)  # the interpreter and make test run only the first
# Cases that the interpreter runs in make test-all alone: each has a smaller one of the same route.
INTERPRETED_IN_FULL_ONLY: Mapping[str, Sequence[str]] = {
    "add_layer_norm_quant": ("35x40-int8-static", "35x40-fp8-*"),
    "add_rms_norm_quant": ("130x96-fp8-*", "130x96-int8-static", "130x96-int8-groups"),
    "causal_conv": ("decode-*", "(33,)*"),
    "fp8_fused_moe": ("21x*", "22x*", "33x*", "1x96*"),
    "fused_moe": ("21x*", "22x*"),
    "gated_delta_rule": ("decode-*", "(9,)*"),
    "image_attention": ("edge", "windows"),
    "int4_fused_moe": ("21x*", "22x*"),
    "int8_fused_moe": ("21x*", "22x*", "33x*", "1x96*"),
    "latent_rope_cache": ("1x3x*", "3x20x*"),
    "moe_align_block_size": ("150x*",),
    "paged_attention": (
        "decode", "prefill", "decode-group", "decode-window-mha-floa", "decode-256-*",
        "prefill-padded", "prefill-long-int8", "softcap", "alibi", "sinks", "latent*",
    ),
    "mxfp4_fused_moe": ("21x*", "22x*", "5x*", "1x96*"),
    "mxfp4_linear": ("33x*", "70x*"),
    "rms_norm_quant": ("130x96-int8-token*", "130x96-int8-static", "130x96-int4-groups"),
    "rope_cos_sin": ("1024x64-32",),
    "ssd_scan": ("decode-*", "(9,)*"),
    "rptq_quant": (
        "21x260 a8 gated dynamic", "21x260 a4 *", "18x612 a8 dynamic", "18x612 a8 fallback",
        "18x612 a4 static",
    ),
    "w8a8_fused_moe": ("21x*", "22x*", "33x*", "1x96*"),
    "upsample_masks": ("3x16->90x60", "2x16->33x107"),
}  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        params = []
        for op in (op for op in registry.op_names() if op != "decode"):
            for name in registry.implementations(op):
                for device in ("cpu", "cuda"):
                    marks = [pytest.mark.gpu] if device == "cuda" else []
                    for dtype in DTYPES:
                        label = f"{op}-{name}-{device}-{str(dtype).removeprefix('torch.')}"
                        params.append(pytest.param(op, name, device, dtype, id=label, marks=marks))
        metafunc.parametrize(("op", "backend", "device", "dtype"), params)


# exp(-x) → inf is expected; NumPy warns
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_implementation_matches_the_reference(
    op: str, backend: str, device: str, dtype: torch.dtype, pytestconfig: pytest.Config
) -> None:
    module = registry.implementations(op)[backend]
    reason = module.unavailable_reason(device)
    if reason is not None:
        pytest.skip(reason)
    tolerance = import_module(f"modelmill.ops.{op}").TOLERANCE[dtype]
    checked, run = 0, registry.adapt_to_named_args(op, module.run)
    for case in _all_cases(op, device, dtype):
        if not quick(case, backend, device):
            continue
        if (
            interpreted(backend, device)
            and pytestconfig.getoption("--quick")
            and in_full_only(op, case)
        ):
            continue
        if not registry.backend_serves_args(op, backend, **case.args):
            continue
        once = interpreted(backend, device) or pytestconfig.getoption("--quick")
        for seed in SEEDS[:1] if once else SEEDS:
            args = _fresh(case, seed)
            expected = _oracle(op, args)
            actual = _run_with_poisoned_memory(run, args)
            _compare(f"{case.name} seed {seed}", actual, expected, tolerance, case)
        if device == "cuda":
            actual, args = _replayed(run, case)
            _compare(f"{case.name} replayed", actual, _oracle(op, args), tolerance, case)
        checked += 1
    if not checked:
        pytest.skip(
            "no case of this op is supported here, or all are too large for the interpreter"
        )


def _all_cases(op: str, device: str, dtype: torch.dtype) -> Iterator[Case]:
    yield from import_module(f"modelmill.ops.{op}").cases(device, dtype)
    yield from EDGES.get(op, lambda *_: iter(()))(device, dtype)


def in_full_only(op: str, case: Case) -> bool:
    """Whether make test leaves the case out where the interpreter runs it."""
    return any(
        fnmatchcase(case.name.strip(), pattern) for pattern in INTERPRETED_IN_FULL_ONLY.get(op, ())
    )


@pytest.mark.parametrize("op", INTERPRETED_IN_FULL_ONLY)
def test_what_the_interpreter_leaves_to_test_all_is_a_part(op: str) -> None:
    cases = list(_all_cases(op, "cpu", torch.float32))
    for pattern in INTERPRETED_IN_FULL_ONLY[op]:
        assert any(fnmatchcase(case.name.strip(), pattern) for case in cases), pattern
    assert not all(in_full_only(op, case) for case in cases if quick(case, "triton", "cpu"))


def interpreted(backend: str, device: str) -> bool:
    """Whether a backend runs in Triton's interpreter."""
    return backend == "triton" and device == "cpu"


def _size(args: Mapping[str, Any]) -> int:
    """Elements of all tensors."""
    return sum(a.numel() for a in args.values() if isinstance(a, torch.Tensor))


def quick(case: Case, backend: str, device: str) -> bool:
    """Whether the case is small enough for the interpreter, if that runs it."""
    return not interpreted(backend, device) or _size(case.args) <= INTERPRETED_AT_MOST


def _fresh(case: Case, seed: int) -> dict[str, Any]:
    """The case's arguments with shuffled floating-point values; caches that are written are NaN."""
    generator = torch.Generator().manual_seed(seed)
    args = dict(case.args)
    for name, value in args.items():
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        if name in ("k_cache", "v_cache") and name in case.writes:
            args[name] = _laid_out_as(value).fill_(float("nan"))
        elif value.numel() > 1 << 20:
            shift = int(torch.randint(value.numel(), (1,), generator=generator))
            # fp8 cannot be rolled on a GPU
            bits = value.view(torch.uint8) if value.element_size() == 1 else value
            args[name] = bits.flatten().roll(shift).view(value.dtype).view(value.shape)
        else:
            order = torch.randperm(value.numel(), generator=generator).to(value.device)
            args[name] = _laid_out_as(value).copy_(value.flatten()[order].view(value.shape))
    return args


def _laid_out_as(value: torch.Tensor) -> torch.Tensor:
    """Memory with the same strides, so that a view stays a view.

    Elements that share memory get their own.
    """
    if any(step == 0 and n > 1 for step, n in zip(value.stride(), value.shape, strict=True)):
        return torch.empty_like(value)
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)


def _oracle(op: str, args: dict[str, Any]) -> Any:
    """The reference on float64 copies; small cases on the CPU.

    Returns (result, caches as written).
    """
    size = _size(args)
    args64 = {}
    for name, value in args.items():
        if isinstance(value, torch.Tensor):
            value = value.cpu() if size < 1 << 20 else value
            # scale is float32 by contract; the reference accepts float64
            value = value.double() if value.is_floating_point() else value.clone()
        elif isinstance(value, RecurrentStepMetadata) and size < 1 << 20:
            value = RecurrentStepMetadata(
                *(v.cpu() if isinstance(v, torch.Tensor) else v for v in value)
            )
        args64[name] = value
    result = registry.adapt_to_named_args(op, registry.reference(op))(**args64)
    return result, _written_caches(args64)


def _written_caches(args: Mapping[str, Any]) -> list[torch.Tensor]:
    """Pages that the op writes: those of one that gets slots."""
    return [args[n] for n in ("k_cache", "v_cache") if "slots" in args and n in args]


def _run_with_poisoned_memory(run: Any, args: dict[str, Any]) -> Any:
    """The result and the caches written, with newly allocated tensors full of NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # makes torch.empty fill with NaN
    try:
        assert torch.empty(1).isnan()
        result = run(**args)
    finally:
        torch.use_deterministic_algorithms(False)
    return result, _written_caches(args)


def _replayed(run: Any, case: Case) -> tuple[Any, dict[str, Any]]:
    """Result of a CUDA graph captured with other values, and the arguments of the replay.

    Where the op reads lengths on the device, those of the replay are shorter.
    """
    static_args = {
        k: _laid_out_as(v).copy_(v) if isinstance(v, torch.Tensor) else v
        for k, v in _fresh(case, 2).items()
    }
    run(**_fresh(case, 2))  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with torch.cuda.graph(graph):
            result = run(**static_args)
    finally:
        torch.use_deterministic_algorithms(False)
    args = _fresh(case, 3)
    if "context_lens" in args:
        new = args["query_start"].diff()
        args["context_lens"] = torch.where(
            args["context_lens"] > 0, new + (args["context_lens"] - new) // 3, 0
        ).int()
    for name, value in args.items():
        if isinstance(value, torch.Tensor):
            static_args[name].copy_(value)
    graph.replay()
    torch.cuda.synchronize()
    return (result, _written_caches(static_args)), args


def _compare(label: str, outputs: Any, expected: Any, tolerance: float, case: Case) -> None:
    flat_outputs = [*(outputs[0] if isinstance(outputs[0], tuple) else (outputs[0],)), *outputs[1]]
    flat_expected = [
        *(expected[0] if isinstance(expected[0], tuple) else (expected[0],)),
        *expected[1],
    ]
    assert len(flat_outputs) == len(flat_expected)
    for index, (actual, reference) in enumerate(zip(flat_outputs, flat_expected)):
        if reference is None:  # a static scale
            assert actual is None, f"{label}, output {index}"
            continue
        assert actual.shape == reference.shape, (
            f"{label}, output {index}: {tuple(actual.shape)} for {tuple(reference.shape)}"
        )
        actual, reference = actual.to(torch.float64), reference.to(actual.device, torch.float64)
        if "rows" in case.meta:  # rows that belong to no sequence are undefined
            actual, reference = actual[: case.meta["rows"]], reference[: case.meta["rows"]]
        # NaN only where the reference did not write the poisoned cache
        assert torch.equal(actual.isnan(), reference.isnan()), (
            f"{label}, output {index}: unwritten or overwritten values"
        )
        error = (
            ((actual - reference).abs() / reference.abs().clamp(min=1.0)).nan_to_num().max()
            if actual.numel()
            else 0.0
        )
        assert float(error) <= tolerance, (
            f"{label}, output {index}: error {float(error):.3g} > {tolerance}"
        )


def _norm_edges(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Columns of a wider tensor, three dimensions, one value per row, values that need eps."""
    parent = randn(6, 200, device=device, dtype=dtype, seed=3)
    weight = randn(96, device=device, dtype=dtype, seed=4)
    yield Case("slice", {"x": parent[:, :96], "weight": weight, "eps": 1e-5})
    yield Case("3d", {"x": parent[:, :96].reshape(2, 3, 96), "weight": weight, "eps": 1e-6})
    yield Case("tiny", {"x": parent[:, :96] * 1e-3, "weight": weight, "eps": 1e-5})
    yield Case("one", {"x": parent[:, :1], "weight": weight[:1], "eps": 1e-5})
    many = randn(60 if device == "cpu" else 3000, 33, device=device, dtype=dtype, seed=5)
    yield Case("many", {"x": many, "weight": weight[:33], "eps": 1e-5})


def _add_norm_edges(device: str, dtype: torch.dtype) -> Iterator[Case]:
    for case in _norm_edges(device, dtype):
        x = case.args["x"]
        residual = randn(*x.shape, device=device, dtype=dtype, seed=9, scale=3.0)
        yield replace(case, args=case.args | {"residual": residual}, writes=("residual",))


def _layer_norm_edges(device: str, dtype: torch.dtype) -> Iterator[Case]:
    for case in _norm_edges(device, dtype):
        yield replace(case, args=case.args | {"bias": case.args["weight"] * 0.5})


def _rope_edges(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Padding slots, columns of a wider qkv, head size 256, pages of 32, a cache inside another."""
    for number, (tokens, heads, kv_heads, dim, page) in enumerate(
        ((6, 4, 2, 64, 16), (3, 1, 1, 256, 32))
    ):
        generator = torch.Generator().manual_seed(number)
        slots = torch.randperm(3 * page, generator=generator)[:tokens]
        slots[1::2] = -1
        angle = randn(tokens, dim // 2, device=device, dtype=torch.float32, seed=number)
        parent = randn(
            tokens, (heads + 2 * kv_heads) * dim + 32, device=device, dtype=dtype, seed=number
        )
        caches = torch.zeros(2, 3, kv_heads, page, dim, device=device, dtype=dtype)
        norm = randn(dim, device=device, dtype=dtype, seed=number + 1)
        args = {
            "qkv": parent[:, 32:] if number else parent[:, :-32].contiguous(),
            "slots": slots.to(device),
        }
        args |= {
            "k_cache": caches[0],
            "v_cache": caches[1],
            "heads": heads,
            "cos": angle.cos(),
            "sin": angle.sin(),
        }
        args |= {"q_norm": norm, "k_norm": norm + 1, "eps": 1e-5} if number else {}
        yield Case(f"padding-{dim}", args, writes=("k_cache", "v_cache"))


def _latent_rope_edges(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Padding slots, pages of 32, one head."""
    for number, interleaved in enumerate((True, False)):
        sizes = 1 + 4 * number, 48, 20, 8, 32
        yield latent_rope_cache.random_case(
            7, sizes, device, dtype, number + 20, interleaved=interleaved, padding=True
        )


def _rope_linear_edges(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Padding slots, pages inside larger ones, columns of a wider x.

    Small enough for a reference on the CPU, which skips padding slots.
    """
    if device == "cpu":
        return
    for dim, page in ((64, 32), (128, 16)):
        for case in qkv_rope_cache.cases_for_shapes(
            [(512, 64, 8192 // dim - 4, 2, dim)], device, dtype, page
        ):
            slots = case.args["slots"].clone()
            slots[::11] = -1
            x = randn(512, 80, device=device, dtype=dtype, seed=dim)[:, 16:]
            pages = torch.zeros(
                slots.numel() // page + 3, 2, 3, page, dim, device=device, dtype=dtype
            )
            edge_args = {
                "slots": slots,
                "x": x,
                "k_cache": pages[:, 0, :2],
                "v_cache": pages[:, 1, :2],
            }
            yield replace(case, name=f"padding-{dim}", args=case.args | edge_args)


def _attention_edges(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Padding rows, bounds far above the lengths, windows in decode, page and head sizes."""
    shapes: list[tuple[str, int, int, int, int, list[tuple[int, int]], int | None, int]] = [
        ("decode-padded", 2, 2, 16, 16, [(1, 70), (1, 0), (1, 1), (1, 0)], None, 300),
        ("decode-group", 8, 2, 40, 8, [(1, 129), (1, 0), (1, 5)], None, 1000),
        ("decode-window", 4, 1, 16, 16, [(1, 150), (1, 31), (1, 32), (1, 33)], 32, 150),
        ("decode-window-mha", 2, 2, 24, 16, [(1, 150), (1, 31), (1, 0)], 90, 256),
        ("decode-256", 2, 2, 256, 16, [(1, 66)], None, 66),
        ("decode-256-group", 6, 2, 256, 16, [(1, 66)], None, 66),
        ("decode-one-split", 2, 2, 32, 32, [(1, 33), (1, 0)], None, 40),
        ("prefill-256", 2, 1, 256, 16, [(20, 35)], None, 35),
        ("prefill-padded", 2, 1, 32, 16, [(3, 3), (2, 0), (70, 131)], None, 400),
        ("prefill-window", 2, 2, 16, 16, [(70, 170)], 20, 170),
        ("prefill-long", 1, 1, 16, 16, [(130, 130), (1, 140)], None, 140),
        ("prefill-window-of-1", 1, 1, 16, 16, [(9, 20)], 1, 20),
    ]
    if device != "cpu":
        shapes += [
            (
                "decode-group-long",
                28,
                4,
                128,
                16,
                [(1, 5000), (1, 0), (1, 64), (1, 65)],
                None,
                32768,
            ),
            ("decode-long", 32, 32, 128, 16, [(1, 3001), (1, 17)], None, 32768),
            (
                "prefill-chunks",
                16,
                4,
                128,
                16,
                [(300, 1000), (1, 999), (129, 129), (1, 1)],
                None,
                4096,
            ),
            ("prefill-80", 5, 5, 80, 16, [(200, 333)], 100, 333),
        ]
    for number, (name, heads, kv_heads, dim, page, lengths, window, bound) in enumerate(shapes):
        yield _paged(
            name, (heads, kv_heads, dim, page), lengths, window, bound, device, dtype, number
        )


def _eight_bit_attention(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """The edge cases with int8 and fp8 pages; a quarter of the v scales is much smaller."""
    for cache_dtype in (torch.int8, torch.float8_e4m3fn):
        for number, case in enumerate(_attention_edges(device, dtype)):
            if device == "cpu" and number % 2 == (cache_dtype is torch.int8):
                continue  # the interpreter is slow: each dtype takes every second case
            caches = {}
            for name in ("k", "v"):
                caches[f"{name}_cache"], scale = quantize_per_row(
                    case.args[f"{name}_cache"], cache_dtype
                )
                caches[f"{name}_scale"] = scale
            draw = torch.rand(scale.shape, generator=torch.Generator().manual_seed(1)).to(device)
            caches["v_scale"] = torch.where(draw < 0.25, scale * 10 ** (-20 * draw), scale)
            yield replace(
                case, name=f"{case.name}-{str(cache_dtype)[6:10]}", args=case.args | caches
            )


def _attention(device: str, dtype: torch.dtype) -> Iterator[Case]:
    yield from _attention_edges(device, dtype)
    yield from _eight_bit_attention(device, dtype)


def _paged(
    name: str,
    sizes: tuple[int, int, int, int],
    lengths: list[tuple[int, int]],
    window: int | None,
    bound: int,
    device: str,
    dtype: torch.dtype,
    seed: int,
) -> Case:
    heads, kv_heads, dim, page = sizes
    counts = [-(-context // page) for _, context in lengths]
    shuffled = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed))
    order = shuffled.to(torch.int32).split([*counts, 2])
    tables = torch.zeros(len(lengths), -(-bound // page), dtype=torch.int32)
    for b, count in enumerate(counts):
        tables[b, :count] = order[b]
    tokens = sum(n for n, _ in lengths)
    caches = randn(2, sum(counts) + 2, kv_heads, page, dim, device=device, dtype=dtype, seed=seed)
    args = {
        "q": randn(tokens, heads, dim, device=device, dtype=dtype, seed=seed + 50),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "block_tables": tables.to(device),
        **ragged_inputs(lengths, device),
        "max_context": bound,
        "scale": dim**-0.5,
        "window": window,
    }
    return Case(name, args)


def _linear_edges(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Row counts around the tiles' sizes, odd widths, columns of a wider x."""
    sizes = ((1, 48, 50), (1, 257, 9), (2, 64, 31), (7, 129, 40), (16, 96, 64), (17, 80, 20))
    for rows, k, n in sizes:
        x = randn(rows, k + 16, device=device, dtype=dtype, seed=rows + k)[:, 16:]
        weight = randn(n, k, device=device, dtype=dtype, seed=n, scale=k**-0.5)
        bias = randn(n, device=device, dtype=dtype, seed=n + 1) if rows % 2 else None
        yield Case(f"edge-{rows}x{k}->{n}", {"x": x, "weight": weight, "bias": bias})


def _int8_edges(device: str, dtype: torch.dtype) -> Iterator[Case]:
    from modelmill.ops.int8_linear import quantize

    shapes = [(c, c.args["x"].shape[0]) for c in _linear_edges(device, dtype)]
    for case, _ in shapes:
        weight, scale = quantize(case.args["weight"])
        yield replace(case, args=case.args | {"weight": weight, "scale": scale})
    for rows, k, n in ((40, 96, 33), (130, 70, 20), (257, 70, 9)):
        weight, scale = quantize(
            randn(n, k, device=device, dtype=torch.float32, seed=n, scale=k**-0.5)
        )
        x = randn(rows, k, device=device, dtype=dtype, seed=k)
        yield Case(
            f"edge-{rows}x{k}->{n}", {"x": x, "weight": weight, "scale": scale, "bias": None}
        )


def _at_model_sizes(op: str) -> Callable[[str, torch.dtype], Iterator[Case]]:
    """Sizes of Qwen3-Next and Mamba-2 2.7B, on a GPU."""

    def make(device: str, dtype: torch.dtype) -> Iterator[Case]:
        if device == "cuda":
            yield from LARGE_CASE_MAKERS[op](device, dtype)

    return make


EDGES = {
    "causal_conv": _at_model_sizes("causal_conv"),
    "gated_delta_rule": _at_model_sizes("gated_delta_rule"),
    "ssd_scan": _at_model_sizes("ssd_scan"),
    "rms_norm": _norm_edges,
    "add_rms_norm": _add_norm_edges,
    "layer_norm": _layer_norm_edges,
    "rope_cache": _rope_edges,
    "latent_rope_cache": _latent_rope_edges,
    "qkv_rope_cache": _rope_linear_edges,
    "paged_attention": _attention,
    "linear": _linear_edges,
    "int8_linear": _int8_edges,
}
