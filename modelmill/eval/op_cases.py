"""What ``bench ops`` times: each op's own cases, and the shapes of the models that the speed targets name.

On a GPU those of a 7B decoder (4096 wide, 11008 inside, 32 heads of 128), on a CPU those of SmolLM2-135M.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module

import torch

from modelmill.eval.op_scale import SCALE, Maker, ordered_forms
from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.eight_bit import by_row
from modelmill.ops.int8_linear import quantize
from modelmill.ops.paged_attention import _case as attention_case
from modelmill.ops.rms_norm_quant import forms as norm_forms
from modelmill.ops.sample import case as sample_case

Shapes = tuple[tuple[int, int, int], ...]
HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB = 576, 1536, 9, 3, 64, 49152
CPU_ROWS = (1, 16)
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def cases(op: str, device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Every case of an op on a kind of device ("cpu", "cuda"), made when it is asked for."""
    yield from import_module(f"modelmill.ops.{op}").cases(device, dtype)
    more = MORE[device].get(op)
    if more is not None:
        yield from more(device, dtype)


def _norm(rows: int, width: int, device: str, dtype: torch.dtype) -> Case:
    x = randn(rows, width, device=device, dtype=dtype, seed=1)
    weight = randn(width, device=device, dtype=dtype, seed=2) + 1
    return Case(f"{rows}x{width}", {"x": x, "weight": weight, "eps": 1e-5}, 2 * nbytes(x))


def _add_norm(rows: int, width: int, device: str, dtype: torch.dtype) -> Case:
    case = _norm(rows, width, device, dtype)
    residual = randn(rows, width, device=device, dtype=dtype, seed=3)
    return Case(case.name, case.args | {"residual": residual}, 2 * case.bytes_moved, writes=("residual",))


def _quantized_norms(rows: int, width: int, device: str, dtype: torch.dtype) -> Iterator[Case]:
    case = _norm(rows, width, device, dtype)
    for name, form in (*norm_forms(width, device, 0), *ordered_forms(width, device)):
        moved = nbytes(case.args["x"]) + rows * width
        yield Case(f"{case.name}-{name}", case.args | form, moved)


def _quantized_add_norms(rows: int, width: int, device: str, dtype: torch.dtype) -> Iterator[Case]:
    for case in _quantized_norms(rows, width, device, dtype):
        residual = randn(rows, width, device=device, dtype=dtype, seed=3)
        moved = case.bytes_moved + 2 * nbytes(residual)
        yield Case(case.name, case.args | {"residual": residual}, moved, writes=("residual",))


def linears(shapes: Shapes) -> Callable[[str, torch.dtype], Iterator[Case]]:
    """Products of (rows, K, N)."""

    def make(device: str, dtype: torch.dtype) -> Iterator[Case]:
        for rows, k, n in shapes:
            x = randn(rows, k, device=device, dtype=dtype, seed=rows)
            weight = randn(n, k, device=device, dtype=dtype, seed=k, scale=k**-0.5)
            moved = nbytes(x, weight) + rows * n * x.element_size()
            yield Case(f"{rows}x{k}->{n}", {"x": x, "weight": weight, "bias": None}, moved, 2 * rows * k * n)

    return make


def int8_linears(shapes: Shapes) -> Callable[[str, torch.dtype], Iterator[Case]]:
    """The same with weights in 8 bits."""

    def make(device: str, dtype: torch.dtype) -> Iterator[Case]:
        for rows, k, n in shapes:
            x = randn(rows, k, device=device, dtype=dtype, seed=rows)
            weight, scale = quantize(randn(n, k, device=device, dtype=torch.float32, seed=k, scale=k**-0.5))
            moved = nbytes(x, weight) + rows * n * x.element_size()
            args = {"x": x, "weight": weight, "scale": scale, "bias": None}
            yield Case(f"{rows}x{k}->{n}", args, moved, 2 * rows * k * n)

    return make


def eight_bit_linears(kind: torch.dtype, shapes: Shapes) -> Callable[[str, torch.dtype], Iterator[Case]]:
    """The same with activations in 8 bits as well, scaled by token."""

    def make(device: str, dtype: torch.dtype) -> Iterator[Case]:
        for rows, k, n in shapes:
            x, x_scale = by_row(randn(rows, k, device=device, dtype=torch.float32, seed=rows), kind)
            weight, scale = by_row(randn(n, k, device=device, dtype=torch.float32, seed=k, scale=k**-0.5), kind)
            args = {"x": x, "weight": weight, "scale": scale, "x_scale": x_scale, "dtype": dtype, "bias": None}
            yield Case(f"{rows}x{k}->{n}", args, nbytes(x, weight) + rows * n * dtype.itemsize, 2 * rows * k * n)

    return make


def samples(shapes: Shapes) -> Callable[[str, torch.dtype], Iterator[Case]]:
    """(rows, vocabulary, which mix of filters every row asks for)."""

    def made(device: str, dtype: torch.dtype) -> Iterator[Case]:  # noqa: ARG001 - logits are float32 in any model
        for rows, vocab, how in shapes:
            yield sample_case(rows, vocab, device, how=how)

    return made


def _attentions(device: str, dtype: torch.dtype) -> Iterator[Case]:
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
        for held, kind in KV_DTYPES.items():
            case = attention_case(name, 32, kv_heads, 128, lengths, None, device, dtype, number)
            yield in_8_bits(case, held, kind)


def in_8_bits(case: Case, name: str, kind: torch.dtype) -> Case:
    """An attention's case over pages of an 8-bit type."""
    args, moved = dict(case.args), case.bytes_moved
    heads, dim = args["k_cache"].shape[1], args["k_cache"].shape[3]
    keys = int(args["context_lens"].sum()) * heads
    moved -= 2 * keys * (dim * (args["k_cache"].element_size() - 1) - 4)
    for part in ("k", "v"):
        args[f"{part}_cache"], args[f"{part}_scale"] = by_row(args[f"{part}_cache"], kind)
    return Case(f"{case.name}-{name}", args, moved, case.flops)


def _small_attentions(device: str, dtype: torch.dtype) -> Iterator[Case]:
    shapes = [(count, 1, context) for count in CPU_ROWS for context in (128, 512, 4096)] + [(1, 512, 512)]
    for number, (count, queries, context) in enumerate(shapes):
        lengths = [(queries, context)] * count
        name = f"{count}x{queries} of {context}"
        yield attention_case(name, HEADS, KV_HEADS, DIM, lengths, None, device, dtype, number)


def _small_layer_norms(device: str, dtype: torch.dtype) -> Iterator[Case]:
    for rows in CPU_ROWS:
        case = _norm(rows, HIDDEN, device, dtype)
        yield Case(case.name, case.args | {"bias": torch.ones(HIDDEN, dtype=dtype)}, case.bytes_moved)


def _small_gates(device: str, dtype: torch.dtype) -> Iterator[Case]:
    for rows in CPU_ROWS:
        gate_up = randn(rows, 2 * INNER, device=device, dtype=dtype, seed=rows)
        yield Case(f"{rows}x{INNER}", {"gate_up": gate_up}, nbytes(gate_up) * 3 // 2)


BIG = ((1, 4096, 151936), (2, 4096, 12288), (8, 4096, 12288), (8, 11008, 4096), (16, 4096, 22016), (4096, 4096, 12288))
BIG_INT8 = ((16, 4096, 12288), (64, 4096, 12288), (256, 4096, 12288), (512, 4096, 12288))
BIG_SIDES = ((4096, 12288), (4096, 4096), (4096, 22016), (11008, 4096))
BIG_EIGHT: Shapes = tuple((rows, k, n) for rows in (1, 8, 64, 256, 1024, 4096) for k, n in BIG_SIDES)
QKV = (HEADS + 2 * KV_HEADS) * DIM
SIDES = ((HIDDEN, QKV), (HIDDEN, HIDDEN), (HIDDEN, 2 * INNER), (INNER, HIDDEN), (HIDDEN, VOCAB))
BIG_SAMPLES: Shapes = tuple((rows, 151936, how) for rows in (1, 8, 64) for how in (0, 1, 2, 4))
SMALL_SAMPLES: Shapes = tuple((rows, VOCAB, how) for rows in CPU_ROWS for how in (0, 1, 2))
SMALL: Shapes = tuple((rows, k, n) for rows in CPU_ROWS for k, n in SIDES)

MORE: dict[str, dict[str, Maker]] = {
    "cuda": SCALE
    | {
        "rms_norm": lambda device, dtype: iter([_norm(16384, 4096, device, dtype)]),
        "add_rms_norm": lambda device, dtype: iter([_add_norm(16384, 4096, device, dtype)]),
        "rms_norm_quant": lambda device, dtype: _quantized_norms(16384, 4096, device, dtype),
        "add_rms_norm_quant": lambda device, dtype: _quantized_add_norms(16384, 4096, device, dtype),
        "linear": linears(BIG),
        "int8_linear": int8_linears(BIG_INT8),
        "w8a8_linear": eight_bit_linears(torch.int8, BIG_EIGHT),
        "fp8_linear": eight_bit_linears(torch.float8_e4m3fn, BIG_EIGHT),
        "sample": samples(BIG_SAMPLES),
        "paged_attention": _attentions,
    },
    "cpu": {
        "rms_norm": lambda device, dtype: (_norm(rows, HIDDEN, device, dtype) for rows in CPU_ROWS),
        "add_rms_norm": lambda device, dtype: (_add_norm(rows, HIDDEN, device, dtype) for rows in CPU_ROWS),
        "layer_norm": _small_layer_norms,
        "silu_mul": _small_gates,
        "linear": linears(SMALL),
        "int8_linear": int8_linears(SMALL),
        "sample": samples(SMALL_SAMPLES),
        "paged_attention": _small_attentions,
    },
}
