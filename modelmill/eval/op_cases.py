"""Cases of ``bench ops``: each op's own, and shapes of the models of the speed targets.

On a GPU the shapes are those of a 7B decoder (hidden size 4096, MLP 11008, 32 heads of 128), on a
CPU those of SmolLM2-135M.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module

import torch

from modelmill.eval.large_op_cases import (
    CPU_QUERY_LENS_BY_STEP,
    LARGE_CASE_MAKERS,
    CaseMaker,
    permuted_quant_args,
    recurrence_case_makers,
)
from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.int8_linear import quantize
from modelmill.ops.paged_attention import _case as attention_case
from modelmill.ops.paged_attention import latent_case
from modelmill.ops.quant_types import quantize_per_row
from modelmill.ops.rms_norm_quant import named_quant_mode_args as norm_quant_modes
from modelmill.ops.sample import random_case as sample_case

Shapes = tuple[tuple[int, int, int], ...]
SMOLLM2_HIDDEN = 576
SMOLLM2_INNER = 1536
SMOLLM2_HEADS = 9
SMOLLM2_KV_HEADS = 3
SMOLLM2_HEAD_DIM = 64
SMOLLM2_VOCAB = 49152
CPU_ROWS = (1, 16)
KV_TORCH_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def bench_cases(op: str, device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Yield every case of an op for a device type ("cpu" or "cuda"); each is made lazily."""
    yield from import_module(f"modelmill.ops.{op}").cases(device, dtype)
    more = EXTRA_CASE_MAKERS[device].get(op)
    if more is not None:
        yield from more(device, dtype)


def _norm_case(rows: int, width: int, device: str, dtype: torch.dtype) -> Case:
    x = randn(rows, width, device=device, dtype=dtype, seed=1)
    weight = randn(width, device=device, dtype=dtype, seed=2) + 1
    return Case(f"{rows}x{width}", {"x": x, "weight": weight, "eps": 1e-5}, 2 * nbytes(x))


def _add_norm_case(rows: int, width: int, device: str, dtype: torch.dtype) -> Case:
    case = _norm_case(rows, width, device, dtype)
    residual = randn(rows, width, device=device, dtype=dtype, seed=3)
    return Case(
        case.name, case.args | {"residual": residual}, 2 * case.bytes_moved, writes=("residual",)
    )


def _norm_quant_cases(rows: int, width: int, device: str, dtype: torch.dtype) -> Iterator[Case]:
    case = _norm_case(rows, width, device, dtype)
    for name, mode in (*norm_quant_modes(width, device, 0), *permuted_quant_args(width, device)):
        moved = nbytes(case.args["x"]) + rows * width
        yield Case(f"{case.name}-{name}", case.args | mode, moved)


def _add_norm_quant_cases(rows: int, width: int, device: str, dtype: torch.dtype) -> Iterator[Case]:
    for case in _norm_quant_cases(rows, width, device, dtype):
        residual = randn(rows, width, device=device, dtype=dtype, seed=3)
        moved = case.bytes_moved + 2 * nbytes(residual)
        yield Case(case.name, case.args | {"residual": residual}, moved, writes=("residual",))


def linear_case_maker(shapes: Shapes) -> Callable[[str, torch.dtype], Iterator[Case]]:
    """Cases of matrix products with shapes (rows, K, N)."""

    def make(device: str, dtype: torch.dtype) -> Iterator[Case]:
        for rows, k, n in shapes:
            x = randn(rows, k, device=device, dtype=dtype, seed=rows)
            weight = randn(n, k, device=device, dtype=dtype, seed=k, scale=k**-0.5)
            moved = nbytes(x, weight) + rows * n * x.element_size()
            yield Case(
                f"{rows}x{k}->{n}",
                {"x": x, "weight": weight, "bias": None},
                moved,
                2 * rows * k * n,
            )

    return make


def int8_linear_case_maker(shapes: Shapes) -> Callable[[str, torch.dtype], Iterator[Case]]:
    """Cases of matrix products with 8-bit weights."""

    def make(device: str, dtype: torch.dtype) -> Iterator[Case]:
        for rows, k, n in shapes:
            x = randn(rows, k, device=device, dtype=dtype, seed=rows)
            weight, scale = quantize(
                randn(n, k, device=device, dtype=torch.float32, seed=k, scale=k**-0.5)
            )
            moved = nbytes(x, weight) + rows * n * x.element_size()
            args = {"x": x, "weight": weight, "scale": scale, "bias": None}
            yield Case(f"{rows}x{k}->{n}", args, moved, 2 * rows * k * n)

    return make


def w8a8_linear_case_maker(
    act_dtype: torch.dtype, shapes: Shapes
) -> Callable[[str, torch.dtype], Iterator[Case]]:
    """Cases of matrix products with 8-bit weights and activations, scaled per token."""

    def make(device: str, dtype: torch.dtype) -> Iterator[Case]:
        for rows, k, n in shapes:
            x, x_scale = quantize_per_row(
                randn(rows, k, device=device, dtype=torch.float32, seed=rows), act_dtype
            )
            weight, scale = quantize_per_row(
                randn(n, k, device=device, dtype=torch.float32, seed=k, scale=k**-0.5), act_dtype
            )
            args = {
                "x": x,
                "weight": weight,
                "scale": scale,
                "x_scale": x_scale,
                "dtype": dtype,
                "bias": None,
            }
            yield Case(
                f"{rows}x{k}->{n}",
                args,
                nbytes(x, weight) + rows * n * dtype.itemsize,
                2 * rows * k * n,
            )

    return make


def sample_case_maker(shapes: Shapes) -> Callable[[str, torch.dtype], Iterator[Case]]:
    """Cases of sampling with shapes (rows, vocabulary size, filter mix of every row)."""

    def make(device: str, dtype: torch.dtype) -> Iterator[Case]:  # noqa: ARG001 - logits are float32 in any model
        for rows, vocab, sampling in shapes:
            yield sample_case(rows, vocab, device, sampling=sampling)

    return make


def _gpu_attention_bench_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    shapes = (
        ("decode-8-1024", 32, [(1, 1024)] * 8),
        ("decode-64-128", 32, [(1, 128)] * 64),
        ("decode-8-4096", 32, [(1, 4096)] * 8),
        ("decode-1-32768", 32, [(1, 32768)]),
        ("decode-gqa-1-4096", 8, [(1, 4096)]),
        ("decode-gqa-64-1024", 8, [(1, 1024)] * 64),
        ("decode-gqa-8-4096", 8, [(1, 4096)] * 8),
        ("prefill-1024", 32, [(1024, 1024)]),
        ("prefill-4096", 32, [(4096, 4096)]),
        ("prefill-chunk-1024-of-4096", 32, [(1024, 4096)]),
    )
    for number, (name, kv_heads, lengths) in enumerate(shapes):
        yield attention_case(name, 32, kv_heads, 128, lengths, None, device, dtype, number)
    own = (("decode-7b-1", 32, [(1, 4096)]), ("decode-7b-64", 32, [(1, 1024)] * 64))
    for number, (name, kv_heads, lengths) in enumerate((*own, *shapes)):
        for kv_name, kv_dtype in KV_TORCH_DTYPES.items():
            case = attention_case(name, 32, kv_heads, 128, lengths, None, device, dtype, number)
            yield with_8bit_kv(case, kv_name, kv_dtype)


LATENT_DIMS = 576, 512  # channels of a token in DeepSeek's caches, and those that are values
V2_LITE_HEADS, V3_HEADS = 16, 128


def _gpu_latent_bench_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Decode and chunks of DeepSeek-V2-Lite and V3, absorbed; a prompt, expanded.

    Floors on an H200, from 4.56 TB/s for the cache, read once, and 700 TFLOPS: V2-Lite 1.0 µs for
    4,096 tokens, 8.3 µs for 32,768 and 16.6 µs for 64 times 1,024; V3 1.6 µs, 13.0 µs, and for 32
    times 4,096 tokens 52 µs: its 128 heads make 242 operations of each byte, more than the GPU.
    """
    shapes = (
        ("latent-lite-1-4096", V2_LITE_HEADS, [(1, 4096)]),
        ("latent-lite-1-32768", V2_LITE_HEADS, [(1, 32768)]),
        ("latent-lite-64-1024", V2_LITE_HEADS, [(1, 1024)] * 64),
        ("latent-v3-1-4096", V3_HEADS, [(1, 4096)]),
        ("latent-v3-1-32768", V3_HEADS, [(1, 32768)]),
        ("latent-v3-32-4096", V3_HEADS, [(1, 4096)] * 32),
        ("latent-lite-chunk-512-of-4096", V2_LITE_HEADS, [(512, 4096)]),
    )
    for number, (name, heads, lengths) in enumerate(shapes):
        case = latent_case(name, heads, LATENT_DIMS, lengths, device, dtype, number)
        yield case
        for kv_name, kv_dtype in KV_TORCH_DTYPES.items():
            yield with_8bit_kv(case, kv_name, kv_dtype)
    expanded = [(1024, 1024)]
    yield attention_case("latent-expanded-1024", V2_LITE_HEADS, V2_LITE_HEADS, 192, expanded, None,
                         device, dtype, 9)  # fmt: skip


def _cpu_latent_bench_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    for lengths in ([(1, 1024)], [(1, 4096)], [(1, 1024)] * 8, [(128, 1024)]):
        name = f"latent {len(lengths)}x{lengths[0][0]} of {lengths[0][1]}"
        yield latent_case(name, V2_LITE_HEADS, LATENT_DIMS, lengths, device, dtype, 1)


def _gpu_all_attention_bench_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    yield from _gpu_attention_bench_cases(device, dtype)
    yield from _gpu_latent_bench_cases(device, dtype)


def _all_cpu_attention_bench_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    yield from _cpu_attention_bench_cases(device, dtype)
    yield from _cpu_latent_bench_cases(device, dtype)


def with_8bit_kv(case: Case, name: str, kv_dtype: torch.dtype) -> Case:
    """Convert an attention case to KV pages of an 8-bit dtype."""
    args, bytes_moved = dict(case.args), case.bytes_moved
    kv_heads, dim = args["k_cache"].shape[1], args["k_cache"].shape[3]
    latent = args.get("value_dim") is not None  # keys alone are read
    rows = int(args["context_lens"].sum()) * kv_heads * (1 if latent else 2)
    bytes_moved -= rows * (dim * (args["k_cache"].element_size() - 1) - 4)
    for part in ("k", "v"):
        args[f"{part}_cache"], args[f"{part}_scale"] = quantize_per_row(
            args[f"{part}_cache"], kv_dtype
        )
    return Case(f"{case.name}-{name}", args, bytes_moved, case.flops)


def _cpu_attention_bench_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    shapes = [(count, 1, context) for count in CPU_ROWS for context in (128, 512, 4096)] + [
        (1, 512, 512)
    ]
    for number, (count, queries, context) in enumerate(shapes):
        lengths = [(queries, context)] * count
        name = f"{count}x{queries} of {context}"
        yield attention_case(
            name,
            SMOLLM2_HEADS,
            SMOLLM2_KV_HEADS,
            SMOLLM2_HEAD_DIM,
            lengths,
            None,
            device,
            dtype,
            number,
        )


def _cpu_layer_norm_bench_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    for rows in CPU_ROWS:
        case = _norm_case(rows, SMOLLM2_HIDDEN, device, dtype)
        yield Case(
            case.name,
            case.args | {"bias": torch.ones(SMOLLM2_HIDDEN, dtype=dtype)},
            case.bytes_moved,
        )


def _cpu_swiglu_bench_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    for rows in CPU_ROWS:
        gate_up = randn(rows, 2 * SMOLLM2_INNER, device=device, dtype=dtype, seed=rows)
        yield Case(f"{rows}x{SMOLLM2_INNER}", {"gate_up": gate_up}, nbytes(gate_up) * 3 // 2)


GPU_GEMM_SHAPES = (
    (1, 4096, 151936),
    (2, 4096, 12288),
    (8, 4096, 12288),
    (8, 11008, 4096),
    (16, 4096, 22016),
    (4096, 4096, 12288),
)
GPU_INT8_SHAPES = ((16, 4096, 12288), (64, 4096, 12288), (256, 4096, 12288), (512, 4096, 12288))
GPU_KN_SHAPES = ((4096, 12288), (4096, 4096), (4096, 22016), (11008, 4096))
GPU_W8A8_SHAPES: Shapes = tuple(
    (rows, k, n) for rows in (1, 8, 64, 256, 1024, 4096) for k, n in GPU_KN_SHAPES
)
QKV_ROWS = (SMOLLM2_HEADS + 2 * SMOLLM2_KV_HEADS) * SMOLLM2_HEAD_DIM
SMOLLM2_KN_SHAPES = (
    (SMOLLM2_HIDDEN, QKV_ROWS),
    (SMOLLM2_HIDDEN, SMOLLM2_HIDDEN),
    (SMOLLM2_HIDDEN, 2 * SMOLLM2_INNER),
    (SMOLLM2_INNER, SMOLLM2_HIDDEN),
    (SMOLLM2_HIDDEN, SMOLLM2_VOCAB),
)
GPU_SAMPLING_SHAPES: Shapes = tuple(
    (rows, 151936, how) for rows in (1, 8, 64) for how in (0, 1, 2, 4)
)
SMALL_SAMPLING_SHAPES: Shapes = tuple(
    (rows, SMOLLM2_VOCAB, how) for rows in CPU_ROWS for how in (0, 1, 2)
)
SMALL_GEMM_SHAPES: Shapes = tuple((rows, k, n) for rows in CPU_ROWS for k, n in SMOLLM2_KN_SHAPES)

EXTRA_CASE_MAKERS: dict[str, dict[str, CaseMaker]] = {
    "cuda": LARGE_CASE_MAKERS
    | {
        "rms_norm": lambda device, dtype: iter([_norm_case(16384, 4096, device, dtype)]),
        "add_rms_norm": lambda device, dtype: iter([_add_norm_case(16384, 4096, device, dtype)]),
        "rms_norm_quant": lambda device, dtype: _norm_quant_cases(16384, 4096, device, dtype),
        "add_rms_norm_quant": lambda device, dtype: _add_norm_quant_cases(
            16384, 4096, device, dtype
        ),
        "linear": linear_case_maker(GPU_GEMM_SHAPES),
        "int8_linear": int8_linear_case_maker(GPU_INT8_SHAPES),
        "w8a8_linear": w8a8_linear_case_maker(torch.int8, GPU_W8A8_SHAPES),
        "fp8_linear": w8a8_linear_case_maker(torch.float8_e4m3fn, GPU_W8A8_SHAPES),
        "sample": sample_case_maker(GPU_SAMPLING_SHAPES),
        "paged_attention": _gpu_all_attention_bench_cases,
    },
    "cpu": recurrence_case_makers(CPU_QUERY_LENS_BY_STEP)
    | {
        "rms_norm": lambda device, dtype: (
            _norm_case(rows, SMOLLM2_HIDDEN, device, dtype) for rows in CPU_ROWS
        ),
        "add_rms_norm": lambda device, dtype: (
            _add_norm_case(rows, SMOLLM2_HIDDEN, device, dtype) for rows in CPU_ROWS
        ),
        "layer_norm": _cpu_layer_norm_bench_cases,
        "silu_mul": _cpu_swiglu_bench_cases,
        "linear": linear_case_maker(SMALL_GEMM_SHAPES),
        "int8_linear": int8_linear_case_maker(SMALL_GEMM_SHAPES),
        "sample": sample_case_maker(SMALL_SAMPLING_SHAPES),
        "paged_attention": _all_cpu_attention_bench_cases,
    },
}
