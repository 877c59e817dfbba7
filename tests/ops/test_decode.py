"""Fused decode: the reference composes the ops; the C++ gives the bits of the single ops."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch

from modelmill.ops import decode as op
from modelmill.ops import registry
from modelmill.ops.case import Case
from modelmill.ops.cpu.common import build
from modelmill.ops.cpu.decoder.decode import MAX_ROWS
from modelmill.ops.decode import DecodeInputs, DecodeLinearWeights, DecoderStackWeights

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KERNELS = pytest.mark.skipif(
    build.unavailable_reason("cpu") is not None, reason=str(build.unavailable_reason("cpu"))
)


def _copied(value: Any, change: Any) -> Any:
    """``change`` of every tensor inside tuples and dataclasses."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_copied(v, change) for v in value)
    if is_dataclass(value):
        made = {
            f.name: _copied(getattr(value, f.name), change)
            for f in fields(value)
            if f.name != "packed"
        }
        return type(value)(**made)
    return value


def _as_float64(args: dict[str, Any]) -> dict[str, Any]:
    return {
        n: _copied(v, lambda t: t.double() if t.is_floating_point() else t.clone())
        for n, v in args.items()
    }


def _fresh(args: dict[str, Any]) -> dict[str, Any]:
    return {n: _copied(v, torch.Tensor.clone) for n, v in args.items()}


def _cases() -> list[Any]:
    return [pytest.param(c, d, id=f"{c.name}-{d}") for d in DTYPES for c in op.cases("cpu", d)]


def _assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = (actual.double() - expected.double()).abs() / expected.double().abs().clamp(min=1.0)
    assert actual.shape == expected.shape
    assert float(error.max()) <= op.TOLERANCE[dtype]


@KERNELS
@pytest.mark.parametrize(("case", "dtype"), _cases())
def test_cpu_variant_computes_the_reference_and_writes_the_pages(
    case: Case, dtype: torch.dtype
) -> None:
    args64, args = _as_float64(case.args), _fresh(case.args)
    expected = op.decode(**args64)
    x_before = args["x"].clone()
    torch.use_deterministic_algorithms(True, warn_only=True)  # makes torch.empty fill with NaN
    try:
        actual = registry.implementations("decode")["cpu"].run(**args)
    finally:
        torch.use_deterministic_algorithms(False)
    assert actual.dtype is torch.float32
    assert torch.equal(args["x"], x_before)
    assert args["stack"].packed["cpu"].supported
    _assert_close(actual, expected, dtype)
    for page, expected_page in zip(
        args["tokens"].k + args["tokens"].v, args64["tokens"].k + args64["tokens"].v, strict=True
    ):
        _assert_close(page, expected_page, dtype)


@KERNELS
@pytest.mark.parametrize(("case", "dtype"), _cases())
def test_cpu_variant_gives_the_bits_of_the_single_kernels(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused, single = _fresh(case.args), _fresh(case.args)
    actual = registry.implementations("decode")["cpu"].run(**fused)
    products = ("linear", "int8_linear", "int4_linear", "int8_group_linear")
    for name in (
        *products,
        "rms_norm",
        "add_rms_norm",
        "silu_mul",
        "rope_cache",
        "paged_attention",
    ):
        monkeypatch.setattr(op, name, registry.implementations(name)["cpu"].run)
    assert torch.equal(actual, op.decode(**single))
    for page, expected_page in zip(
        fused["tokens"].k + fused["tokens"].v, single["tokens"].k + single["tokens"].v, strict=True
    ):
        assert torch.equal(page, expected_page)


LONGER = {
    "singles": [(1, 5 + 3 * i) for i in range(20)],
    "a piece behind singles": [*((1, 30 + i) for i in range(13)), (9, 40)],
    "a piece of two parts, then singles": [(19, 40), (1, 3), (1, 50)],
    "a whole prompt": [(32, 32)],
    "pieces and rows without logits": [(3, 3), (14, 60), (5, 9), (1, 70)],
}


@KERNELS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_format", ["", "int8", "int4"])
@pytest.mark.parametrize("lengths", LONGER.values(), ids=LONGER)
def test_more_tokens_go_in_parts(
    lengths: list[tuple[int, int]], weight_format: str, dtype: torch.dtype
) -> None:
    """Logits of some rows and of all are the reference's, and the pages too."""
    assert build.SMALL_M_LIMIT < sum(n for n, _ in lengths) <= MAX_ROWS
    for extras in (False, True):
        case_args = op._case(lengths, 4, 2, weight_format, extras, dtype, 7)
        args64, args = _as_float64(case_args), _fresh(case_args)
        expected = op.decode(**args64)
        _assert_close(registry.implementations("decode")["cpu"].run(**args), expected, dtype)
        assert args["stack"].packed["cpu"].supported
        for page, expected_page in zip(
            args["tokens"].k + args["tokens"].v,
            args64["tokens"].k + args64["tokens"].v,
            strict=True,
        ):
            _assert_close(page, expected_page, dtype)


@KERNELS
def test_rows_have_the_same_bits_alone_and_in_parts() -> None:
    """What a token computes does not depend on how many go with it, nor in which part."""
    run = registry.implementations("decode")["cpu"].run
    together = op._case([(1, 5 + 3 * i) for i in range(20)], 4, 2, "int8", False, torch.bfloat16, 7)
    actual = run(**_fresh(together))
    t = together["tokens"]
    few = [2, 15, 16, 19]
    alone: DecodeInputs = replace(
        t, slots=t.slots[few], block_tables=t.block_tables[few], context_lens=t.context_lens[few],
        query_start=torch.arange(len(few) + 1, dtype=torch.int32), cos=t.cos[few], sin=t.sin[few],
    )  # fmt: skip
    args = _fresh({"x": together["x"][few], "stack": together["stack"], "tokens": alone})
    assert torch.equal(run(**args), actual[few])


@KERNELS
def test_what_the_kernel_cannot_read_goes_to_the_reference() -> None:
    case = next(iter(op.cases("cpu", torch.float32)))
    expected = op.decode(**_fresh(case.args))
    run = registry.implementations("decode")["cpu"].run
    args = _fresh(case.args)
    strided_head = DecodeLinearWeights(torch.stack((args["stack"].lm_head.weight,) * 2, -1)[..., 0])
    strided_stack = replace(args["stack"], lm_head=strided_head, packed={})
    _assert_close(run(args["x"], strided_stack, args["tokens"]), expected, torch.float32)
    args = _fresh(case.args)
    tokens: DecodeInputs = replace(args["tokens"], context_lens=args["tokens"].context_lens.long())
    assert torch.equal(run(args["x"], args["stack"], tokens), expected)


@KERNELS
def test_other_pages_are_packed_again() -> None:
    case = next(iter(op.cases("cpu", torch.float32)))
    run = registry.implementations("decode")["cpu"].run
    args = _fresh(case.args)
    stack: DecoderStackWeights = args["stack"]
    first = run(**args)
    tokens = _fresh(case.args)["tokens"]
    assert torch.equal(run(args["x"], stack, tokens), first)
    assert stack.packed["cpu"].k is tokens.k


@KERNELS
def test_a_kernel_switched_by_hand_is_never_bypassed() -> None:
    assert registry.select_backends("cpu").decode is not None
    assert registry.select_backends("cpu", {"rms_norm": "torch"}).decode is None
    plain = dict.fromkeys(registry.op_names(), "torch")
    assert registry.select_backends("cpu", plain).decode is None
