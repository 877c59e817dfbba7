"""GEMM ops bound to a weight: the choice of each call, made once for a class of row counts."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelmill.ops import registry
from modelmill.ops.bound_op import BoundOp, SelectedOp, bucket_edges_for_count
from modelmill.ops.cuda.common import launch
from modelmill.ops.kernel_support import (
    HALF_DTYPES,
    GemmProblem,
    GemmSupportRange,
    make_dense_gemm_problem,
)
from modelmill.ops.operand_guards import make_gemm_guard
from modelmill.weights.dense import DenseWeight
from modelmill.weights.int4 import Int4Weight

BF = torch.bfloat16
GEMMS = [
    op
    for op, each in registry.op_declarations().items()
    if each.problem is not None and each.guard is make_gemm_guard and each.alike is None
]
ROWS = (1, 2, 8, 9, 16, 17, 33, 48, 64, 65, 257, 511, 512, 640, 768, 1024, 2048)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> registry.Ops:
    """The ops of a GPU of 132 SMs; tensors on the CPU say that they are there. Nothing is run."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    monkeypatch.setattr(launch, "sm_count", lambda *_: 132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    # all of them first: a module that is imported later would keep the patched function of another
    modules = [
        module
        for op in registry.op_names()
        for module in registry.implementations(op, ("cuda", "triton")).values()
    ]
    for module in modules:
        monkeypatch.setattr(module, "unavailable_reason", lambda _: None)
    return registry.select_backends("cuda")


def empty(*shape: int, dtype: torch.dtype = BF) -> torch.Tensor:
    """Memory that is never read, at a multiple of 16 bytes."""
    return torch.empty(shape, dtype=dtype)


def operands(op: str, rows: int, n: int, k: int, dtype: torch.dtype = BF) -> dict[str, Any]:
    """Packed operands of a product [rows, k] · [n, k]ᵀ by name, groups of 128 columns."""
    x, groups = empty(rows, k, dtype=dtype), -(-k // 128)
    if op == "rptq_linear":
        k = groups * 128
        codes, grid = empty(n, k, dtype=torch.int8), empty(n, groups, dtype=torch.float16)
        stored = {"q": empty(rows, k, dtype=torch.int8), "weight": codes, "scale": grid}
        steps = {"step": empty(groups, dtype=torch.float32), "constant": None}
        return stored | {"offset": None, "group": 128, **steps, "bias": None, "dtype": dtype}
    if op in ("int4_linear", "int4_linear_swiglu", "int8_group_linear"):
        codes = (
            empty(n, -(-k // 32) * 16, dtype=torch.uint8)
            if op.startswith("int4")
            else empty(n, -(-k // 32) * 32, dtype=torch.int8)
        )
        grid = empty(n, groups, dtype=torch.float16)
        return {"x": x, "weight": codes, "scale": grid, "offset": grid, "group": 128, "bias": None}
    if op == "mxfp4_linear":
        codes, blocks = empty(n, -(-k // 32) * 16, dtype=torch.uint8), -(-k // 32)
        scales = {"scale": empty(n, blocks, dtype=torch.uint8), "offset": None}
        return {"x": x, "weight": codes, **scales, "group": 32, "bias": None}
    scale = empty(n, dtype=torch.float32)
    if op in ("w8a8_linear", "w8a8_linear_swiglu", "fp8_linear"):
        values = torch.float8_e4m3fn if op == "fp8_linear" else torch.int8
        x, weight = empty(rows, k, dtype=values), empty(n, k, dtype=values)
        scales = {"scale": scale, "x_scale": empty(rows, dtype=torch.float32)}
        return {"x": x, "weight": weight, **scales, "dtype": dtype, "bias": None}
    if op.startswith("int8_linear"):
        return {"x": x, "weight": empty(n, k, dtype=torch.int8), "scale": scale, "bias": None}
    dense = {"x": x, "weight": empty(n, k, dtype=dtype)}
    if op == "linear_add":
        dense["residual"] = empty(rows, n, dtype=dtype)
    return dense | {"bias": empty(n, dtype=dtype) if op == "linear_gelu" else None}


def positional_args(op: str, named: dict[str, Any]) -> tuple[Any, ...]:
    """The op's arguments."""
    declaration = registry.op_declarations()[op]
    return declaration.to_positional_args((), declaration.pack_named_inputs(named))


def with_rows(op: str, named: dict[str, Any], rows: int) -> dict[str, Any]:
    """The same weight, as many rows of everything that has some."""
    other = operands(op, rows, 16, next(iter(named.values())).shape[1])
    shared_args = {name: other[name] for name in ("x", "q", "x_scale", "residual") if name in named}
    shared_args = {name: value for name, value in shared_args.items() if named[name] is not None}
    first = next(iter(shared_args))
    shared_args[first] = shared_args[first].to(named[first].dtype)
    if "residual" in shared_args:
        n = named["weight"].shape[0]
        shared_args["residual"] = empty(rows, n, dtype=named["residual"].dtype)
    return named | shared_args


def name_of(run: Callable[..., Any]) -> tuple[object, ...]:
    """What tells functions apart: bound ones by what they bind."""
    function = getattr(run, "func", run)
    return (function, tuple(getattr(run, "keywords", {}).items()))


@pytest.mark.parametrize("op", GEMMS)
@pytest.mark.parametrize(("n", "k"), [(12288, 4096), (22016, 4096), (576, 1536), (40, 96)])
def test_a_binding_chooses_as_a_call_does(op: str, n: int, k: int, hopper: registry.Ops) -> None:
    gemm = getattr(hopper, op)
    assert isinstance(gemm, SelectedOp)
    named = operands(op, 3, n, k)
    bound = gemm.bind(*positional_args(op, named))
    assert bound is not None
    for rows in ROWS:
        args = positional_args(op, with_rows(op, named, rows))
        assert bound.choice.select_function(rows) is gemm.select_function(*args), rows


@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    op=st.sampled_from(GEMMS),
    n=st.sampled_from([8, 16, 24, 33, 40, 96, 520, 1032]),
    k=st.sampled_from([32, 96, 100, 128, 256, 288, 576, 1056]),
    dtype=st.sampled_from([BF, torch.float16, torch.float32, torch.float64]),
    rows=st.integers(1, 3000),
    columns=st.sampled_from([0, 0, 0, 1, 8]),
)
def test_the_choice_is_the_same_for_other_operands(
    op: str, n: int, k: int, dtype: torch.dtype, rows: int, columns: int, hopper: registry.Ops
) -> None:
    """Also for rows of a wider matrix, which a binding leaves to the call."""
    gemm, named = getattr(hopper, op), operands(op, 5, n, k, dtype)
    bound = gemm.bind(*positional_args(op, named))
    assert bound is not None
    changed = with_rows(op, named, rows)
    first = next(iter(changed))
    if columns:
        wide = empty(rows, changed[first].shape[1] + columns, dtype=changed[first].dtype)
        changed[first] = wide[:, columns:]
    calls: list[object] = []
    args = positional_args(op, changed)
    expected = gemm.select_function(*args)

    def spy(run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *_: calls.append(run)

    hooked = gemm.with_hook(spy)
    hooked.bind(*positional_args(op, named)).call(*args)
    assert calls == [expected]


def test_nothing_is_checked_again_in_a_bound_call(
    hopper: registry.Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module("modelmill.ops.cuda.w8a8_gemm.w8a8_linear")
    checked: list[object] = []
    supports = module.supports

    def counted(inputs: object) -> bool:
        checked.append(inputs)
        return supports(inputs)

    monkeypatch.setattr(module, "supports", counted)
    ran: list[object] = []
    gemm = registry.select_backends("cuda").w8a8_linear.with_hook(
        lambda run: lambda *args: ran.append(run)
    )
    args = positional_args("w8a8_linear", operands("w8a8_linear", 100, 64, 64))
    bound = gemm.bind(*args)
    assert len(checked) == 1
    for _ in range(3):
        bound.call(*args)
    assert (len(checked), len(ran)) == (1, 3)
    x = empty(100, 80, dtype=torch.int8)[:, :64]
    bound.call(args[0]._replace(x=x))
    assert (len(checked), len(ran)) == (2, 4), "rows of a wider matrix are checked"


def test_a_class_whose_exact_row_count_decides_is_measured(hopper: registry.Ops) -> None:
    """Tiles of a fused gate fill the SMs with 512 and 768 rows, and not with 640."""
    bound = hopper.linear_swiglu.bind(
        *positional_args("linear_swiglu", operands("linear_swiglu", 1, 22016, 4096))
    )
    large = import_module("modelmill.ops.cuda.gemm_16bit.linear_swiglu").KERNELS[1].run
    assert [bound.choice.select_function(m) is large for m in (511, 512, 640, 768, 896, 1024)] == [
        False, True, False, True, False, True,
    ]  # fmt: skip


def test_row_classes_end_where_a_range_does(hopper: registry.Ops) -> None:
    bound = hopper.int4_linear.bind(
        *positional_args("int4_linear", operands("int4_linear", 1, 4096, 4096))
    )
    assert isinstance(bound, BoundOp)
    choice = bound.choice
    assert choice.edges == bucket_edges_for_count("m", choice._implementations)
    assert {1, 8, 16, 32, 64} <= set(choice.edges)
    assert len(choice.edges) == len(choice.runs)


def test_a_weight_that_is_dropped_is_freed_at_once(hopper: registry.Ops) -> None:
    """No cycle of references holds it: the collector does not know the memory of a GPU."""
    gemm = hopper.linear.with_hook(lambda run: lambda *args: None)
    weight = DenseWeight(empty(96, 64))
    stored = weakref.ref(weight.weight)
    weight.run_bound_op(gemm, empty(3, 64), weight.weight, None)
    assert weight._bound_ops
    gc.disable()
    try:
        del weight
        assert stored() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("change", ["output dtype", "misaligned scales", "no bias"])
def test_what_a_binding_did_not_check_is_checked_in_the_call(
    change: str, hopper: registry.Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    selected: list[object] = []
    op = "linear" if change == "no bias" else "w8a8_linear"
    gemm = getattr(hopper, op).with_hook(lambda run: lambda *args: None)
    args = positional_args(op, operands(op, 100, 64, 64))
    bound = gemm.bind(*args)
    assert bound is not None
    monkeypatch.setattr(
        gemm, "select_function", lambda *args: selected.append(args) or (lambda *_: None)
    )
    bound.call(*args)
    assert not selected
    if change == "no bias":
        bound.call(*args[:2])
    elif change == "output dtype":
        bound.call(args[0]._replace(dtype=torch.float32))
    else:
        scales = args[0].x_scale
        wide = torch.empty(len(scales) + 1, dtype=scales.dtype)
        bound.call(args[0]._replace(x_scale=wide[1:]))
    assert len(selected) == 1


def test_a_weight_binds_once_and_again_for_other_ops(hopper: registry.Ops) -> None:
    weight, calls = DenseWeight(empty(96, 64)), []

    def hook(name: str) -> Any:
        return lambda run: lambda *args: calls.append(name)

    first, second = (hopper.linear.with_hook(hook(name)) for name in ("first", "second"))
    x = empty(40, 64)
    weight.run_bound_op(first, x, weight.weight, None)
    bound = weight._bound_ops["linear"]
    weight.run_bound_op(first, x, weight.weight, None)
    assert weight._bound_ops["linear"] is bound
    weight.run_bound_op(second, x, weight.weight, None)
    assert calls == ["first", "first", "second"]
    assert "_bound_ops" not in vars(copy.deepcopy(weight))


def test_an_op_without_choice_is_called_as_it_is() -> None:
    ops = registry.select_backends("cpu")
    weight = Int4Weight.pack(torch.randn(24, 64), torch.float32, group_size=32)
    x = torch.randn(3, 64)
    assert torch.allclose(weight.matmul(x, None, ops), x @ weight.dequantize().T, atol=1e-4)
    assert not isinstance(ops.int4_linear, SelectedOp)


@pytest.mark.parametrize(
    ("change", "covered"),
    [
        ({}, True),
        ({"m": 0}, False),
        ({"m": 17}, False),
        ({"n": 36}, False),
        ({"k": 40}, False),
        ({"dtype": torch.float32}, False),
        ({"weight_dtype": torch.int8}, False),
        ({"out_dtype": torch.float16}, False),
        ({"scale_dtype": torch.float16}, False),
        ({"group": 48}, False),
        ({"bias": True}, False),
        ({"n": 8}, False),
        ({"device": 3}, False),
    ],
    ids=str,
)
def test_a_range_is_what_its_fields_say(change: dict[str, Any], covered: bool) -> None:
    served = GemmSupportRange(
        m=(1, 16),
        n_multiple=8,
        k_multiple=32,
        dtypes=HALF_DTYPES,
        weight_dtypes=(BF,),
        out_dtypes=(BF,),
        scale_dtypes=(torch.float32,),
        group_multiple=32,
        bias=False,
        min_weight_bytes=2048,
        fits=lambda problem: problem.device != 3,
    )
    problem = GemmProblem(16, 32, 64, BF, BF, BF, 64, 1, torch.float32)
    assert served.covers(problem._replace(**change)) is covered


def test_a_matrix_of_other_dimensions_has_no_rows() -> None:
    assert make_dense_gemm_problem(empty(2, 3, 4), empty(5, 4)).m == 0
