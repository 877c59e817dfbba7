"""Ops of a step bound to a module: what a bound call runs is what the op would have chosen."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelmill.ops import registry
from modelmill.ops.bound_op import CachedOpBinding, SelectedOp
from modelmill.ops.paged_attention import PagedAttentionInputs
from modelmill.ops.quant_types import ActQuantSpec
from modelmill.ops.rope_cache import RopeCacheInputs
from tests.ops.test_bound_op import BF, empty
from tests.ops.test_bound_op import hopper as hopper

DTYPES = (BF, torch.float16, torch.float32, torch.float64)
MANY = settings(
    deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def spied(op: SelectedOp, ran: list[object]) -> SelectedOp:
    """The op; instead of running a function it is written down."""
    return op.with_hook(lambda run: lambda *_: ran.append(run))


def check(op: SelectedOp, first: tuple[Any, ...], then: tuple[Any, ...]) -> None:
    """A binding made by the first call runs in the second what the op would choose."""
    ran: list[object] = []
    recorder, binding = spied(op, ran), CachedOpBinding()
    for args in (first, then, first, then):
        binding(recorder, *args)
    expected = [op.select_function(*args) for args in (first, then)]
    assert ran == expected * 2


def rows_of(rows: int, width: int, dtype: torch.dtype, columns: int, batch: int) -> torch.Tensor:
    """Rows, of a wider matrix with ``columns`` more; of ``batch`` where that is not 0."""
    shape = (batch, rows) if batch else (rows,)
    return empty(*shape, width + columns, dtype=dtype)[..., columns:]


def arguments(
    op: str, rows: int, width: int, dtype: torch.dtype, columns: int, batch: int, shared: Any
) -> tuple[Any, ...]:
    """Positional arguments of a row-wise op."""
    x = rows_of(rows, width, dtype, columns, batch)
    weight, spec, scale = shared
    other = empty(*x.shape, dtype=dtype)
    return {
        "rms_norm": (x, weight, 1e-5),
        "add_rms_norm": (x, other, weight, 1e-5),
        "layer_norm": (x, weight, weight, 1e-5),
        "add_layer_norm": (x, other, weight, weight, 1e-5),
        "rms_norm_quant": (x, weight, 1e-5, spec._replace()),
        "add_rms_norm_quant": (x, other, weight, 1e-5, spec._replace()),
        "quantize": (x, spec._replace()),
        "silu_mul": (x,),
        "gelu": (x,),
        "gelu_tanh": (x,),
        "gelu_quant": (x, spec.dtype, scale),
        "silu_mul_quant": (x, spec.dtype, scale),
        "argmax": (x,),
    }[op]


ROW_OPS = (
    "rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "rms_norm_quant",
    "add_rms_norm_quant", "quantize", "silu_mul", "gelu", "gelu_tanh", "gelu_quant",
    "silu_mul_quant", "argmax",
)  # fmt: skip


@MANY
@given(
    op=st.sampled_from(ROW_OPS),
    counts=st.tuples(st.integers(0, 700), st.integers(0, 700)),
    width=st.sampled_from([8, 96, 100, 4096]),
    dtypes=st.tuples(*[st.sampled_from(DTYPES)] * 3),
    columns=st.tuples(*[st.sampled_from([0, 0, 1, 8])] * 2),
    batches=st.tuples(*[st.sampled_from([0, 0, 2])] * 2),
    permuted=st.booleans(),
    static=st.sampled_from([0, 1, 2]),
    values=st.sampled_from([torch.int8, torch.float8_e4m3fn]),
    on_gpu=st.booleans(),
)
def test_rows(
    op: str, counts: Any, width: int, dtypes: Any, columns: Any, batches: Any, permuted: bool,
    static: int, values: torch.dtype, on_gpu: bool, hopper: registry.Ops,
) -> None:  # fmt: skip
    ops = hopper if on_gpu else registry.select_backends("cpu")
    selected = getattr(ops, op)
    if not isinstance(selected, SelectedOp):
        return
    perm = torch.arange(width, dtype=torch.int32) if permuted else None
    scale = None if not static else torch.ones(1 if static == 1 else width)
    shared = empty(width, dtype=dtypes[0]), ActQuantSpec(values, scale, None, perm), scale
    calls = [
        arguments(op, rows, width, dtype, column, batch, shared)
        for rows, dtype, column, batch in zip(counts, dtypes[1:], columns, batches, strict=True)
    ]
    if any(args[0].dim() != 2 for args in calls) and op == "argmax":
        return
    check(selected, *calls)


def attention_inputs(
    q: tuple[int, int, int], dtype: torch.dtype, sequences: int, queries: int, pages: Any,
    wide: int = 0, index_dtype: torch.dtype = torch.int32,
) -> PagedAttentionInputs:  # fmt: skip
    """A step of q [T, heads, D] over these pages."""
    tokens, heads, dim = q
    indices = [
        torch.zeros(shape, dtype=index_dtype)
        for shape in ((sequences, 3), (sequences + 1,), (sequences,))
    ]
    k_cache, v_cache, k_scale, v_scale = pages
    rows = empty(tokens, heads + wide, dim, dtype=dtype)[:, :heads]
    return PagedAttentionInputs(
        rows, k_cache, v_cache, *indices, queries, 100, 1.0, None, k_scale, v_scale
    )


def pages_of(kv_heads: int, size: int, dim: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Keys, values and their scales."""
    caches = [torch.zeros(3, kv_heads, size, dim, dtype=dtype) for _ in range(2)]
    scaled = dtype in (torch.int8, torch.float8_e4m3fn)
    return (*caches, *[torch.ones(3, kv_heads, size) if scaled else None for _ in range(2)])


STEPS = st.tuples(
    st.sampled_from([1, 60, 128, 129, 500]),
    st.sampled_from([1, 2, 40, 200, 1025]),
    st.sampled_from([1, 2, 64, 65, 129]),
    st.sampled_from([0, 0, 1]),
    st.sampled_from([torch.int32, torch.int32, torch.int64]),
)


@MANY
@given(
    heads=st.sampled_from([(2, 2), (4, 2), (32, 2)]),
    dim=st.sampled_from([4, 64, 80, 128, 256]),
    size=st.sampled_from([4, 12, 16, 128]),
    dtype=st.sampled_from(DTYPES[:3]),
    page_dtype=st.sampled_from([None, torch.int8, torch.float8_e4m3fn]),
    steps=st.tuples(STEPS, STEPS),
    on_gpu=st.booleans(),
)
def test_attention(
    heads: Any, dim: int, size: int, dtype: torch.dtype, page_dtype: torch.dtype | None,
    steps: Any, on_gpu: bool, hopper: registry.Ops,
) -> None:  # fmt: skip
    op = (hopper if on_gpu else registry.select_backends("cpu")).paged_attention
    pages = pages_of(heads[1], size, dim, page_dtype or dtype)
    calls = [
        (attention_inputs((tokens, heads[0], dim), dtype, sequences, queries, pages, *rest),)
        for tokens, sequences, queries, *rest in steps
    ]
    check(op, *calls)


@MANY
@given(
    dim=st.sampled_from([3, 64, 128, 258]),
    dtype=st.sampled_from(DTYPES),
    page_dtype=st.sampled_from([BF, torch.float32, torch.int8, torch.float8_e4m3fn]),
    steps=st.tuples(*[st.tuples(st.integers(0, 300), st.sampled_from(range(5)))] * 2),
    on_gpu=st.booleans(),
)
def test_rope(
    dim: int, dtype: torch.dtype, page_dtype: torch.dtype, steps: Any, on_gpu: bool,
    hopper: registry.Ops,
) -> None:  # fmt: skip
    op = (hopper if on_gpu else registry.select_backends("cpu")).rope_cache
    k_cache, v_cache, k_scale, v_scale = pages_of(2, 16, dim, page_dtype)

    def call(rows: int, change: int) -> tuple[Any, ...]:
        angles = [torch.zeros(rows, dim // 2) for _ in range(2)]
        slots = torch.zeros(rows, dtype=torch.int64)
        inputs = RopeCacheInputs(
            k_cache, v_cache, slots, 2, *angles, k_scale=k_scale, v_scale=v_scale
        )
        changes: tuple[dict[str, Any], ...] = (
            {},
            {"cos": None},
            {"cos": angles[0].double()},
            {"slots": slots.int()},
            {"q_norm": empty(dim, dtype=dtype)},
        )
        return empty(rows, 6 * dim, dtype=dtype), inputs._replace(**changes[change])

    check(op, *[call(*step) for step in steps])


def mixed_step(dtype: torch.dtype, page_dtype: torch.dtype, queries: int) -> Any:
    """The arguments of a step of prompts and single queries."""
    return attention_inputs((300, 2, 128), dtype, 3, queries, pages_of(2, 16, 128, page_dtype))


@pytest.mark.parametrize(
    ("page_dtype", "queries", "who"),
    [
        (BF, 200, ("cuda", "paged_decode16")),
        (BF, 20, ("triton", "paged_decode16")),
        (torch.int8, 200, ("triton", "paged_decode8")),
        (torch.float8_e4m3fn, 200, ("triton", "triton")),
    ],
    ids=str,
)
def test_the_parts_of_a_mixed_step_go_to_the_first_that_serves_them(
    page_dtype: torch.dtype, queries: int, who: tuple[str, str], hopper: registry.Ops
) -> None:
    run = hopper.paged_attention.select_function(mixed_step(BF, page_dtype, queries))
    parts = [cell.cell_contents for cell in run.__closure__ or ()]
    by_name = {part.__name__: part.__module__ for part in parts}
    assert who[0] in by_name["prefill"]
    assert who[1] in by_name["decode"]


def test_without_another_backend_a_kernel_takes_the_whole_step(hopper: registry.Ops) -> None:
    op = hopper.paged_attention
    alone = SelectedOp(op.name, op.declaration, op.implementations[:1], op.fallback)
    served = mixed_step(BF, BF, 200)
    gqa = served._replace(q=empty(300, 32, 128))
    assert alone.select_function(gqa).__name__ == "prefill"
    assert alone.select_function(mixed_step(BF, BF, 20)) is op.fallback


def test_pages_and_weights_are_freed_at_once(hopper: registry.Ops) -> None:
    ran: list[object] = []
    binding = CachedOpBinding()
    inputs = mixed_step(BF, BF, 200)
    pages = weakref.ref(inputs.k_cache)
    binding(spied(hopper.paged_attention, ran), inputs)
    assert binding._bound is not None
    gc.disable()
    try:
        del inputs
        assert pages() is None
        weight = empty(64)
        of_weight, norm = weakref.ref(weight), CachedOpBinding()
        norm(spied(hopper.rms_norm, ran), empty(3, 64), weight, 1e-5)
        assert norm._bound is not None
        del weight, norm
        assert of_weight() is None
    finally:
        gc.enable()


def test_a_binding_is_made_once_and_a_copy_makes_its_own(
    hopper: registry.Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[object] = []
    op, binding, weight = spied(hopper.rms_norm, ran), CachedOpBinding(), empty(64)
    binding(op, empty(3, 64), weight, 1e-5)
    bound = binding._bound
    selected: list[object] = []
    select: Callable[..., Any] = op.select_function
    monkeypatch.setattr(op, "select_function", lambda *args: selected.append(args) or select(*args))
    for rows in (3, 700):
        binding(op, empty(rows, 64), weight, 1e-5)
    assert binding._bound is bound
    assert not selected
    binding(op, empty(3, 65)[:, 1:], weight, 1e-5)
    assert len(selected) == 1, "rows of a wider matrix are checked"
    assert binding._bound is bound
    binding(op, empty(3, 64), empty(64), 1e-5)
    assert binding._bound is not bound, "another weight is bound"
    assert copy.deepcopy(binding)._bound is None
