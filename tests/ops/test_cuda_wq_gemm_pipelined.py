"""Products with 4- and 8-bit weights whose pieces come through shared memory: sizes, every form,
hard inputs.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelmill.ops import int8_group_linear, registry
from modelmill.ops.cuda.weight_only_gemm import (
    int8_gemm_small_m,
    wq_gemm_large_m,
    wq_gemm_pipelined,
)
from modelmill.ops.cuda.weight_only_gemm.wq_gemm_tile import (
    BlockSmemPlan,
    WqSpec,
    supports_weight,
)
from modelmill.ops.groupwise import GroupwiseLinearInputs, make_groupwise_problem
from modelmill.ops.int4_linear import int4_linear
from tests.ops.nvcc import compiles_without_spills, requires_cuda_kernels, requires_nvcc
from tests.ops.random_codes import random_codes

LIMIT = {torch.bfloat16: 3e-3, torch.float16: 5e-4}  # of the whole, in the norm


BITS_AND_GROUPS = [
    (4, 32),
    (4, 64),
    (4, 128),
    (4, 256),
    (4, 512),
    (4, 1 << 20),
    (8, 32),
    (8, 64),
    (8, 128),
    (8, 512),
    (8, 1 << 20),
]


@given(
    st.integers(1, 4000),
    st.integers(1, 800),
    st.sampled_from(BITS_AND_GROUPS),
    st.booleans(),
    st.sampled_from([32, 64, 65, 128, 129, 1000]),
)
def test_a_form_fits_wherever_one_is_chosen(
    eights: int, runs: int, bits_and_group: tuple[int, int], offset: bool, tokens: int
) -> None:
    (bits, group), rows = bits_and_group, 8 * eights
    made = WqSpec(bits, 32 * runs, group, offset)
    assert supports_weight(rows, made, gated=False)
    box, split_k = (
        wq_gemm_pipelined.block_rows(tokens),
        wq_gemm_pipelined.best_split_k(rows, made, wq_gemm_pipelined.block_rows(tokens), 132),
    )
    if made.groups_per_tile == 1 or made.groups_per_split(4) <= 128:
        assert split_k is not None
    if split_k is not None:
        memory = BlockSmemPlan(made, box, split_k)
        assert memory.shared_bytes <= 227 << 10
        assert 3 <= memory.num_stages <= 8


def test_what_it_does_not_serve() -> None:
    for rows, spec_args in (
        (4096, (4, 4096, 96)),
        (4096, (8, 4096, 96)),
        (4096, (4, 4096, 384)),
        (4100, (8, 4096, 128)),
    ):
        assert not supports_weight(rows, WqSpec(*spec_args, offset=False), gated=False)
    assert not supports_weight(4104, WqSpec(4, 4096, 128, offset=True), gated=True)
    assert not supports_weight(
        4096, WqSpec(8, 4096, 128, offset=True, float32_scales=True), gated=False
    )


@requires_nvcc
@pytest.mark.parametrize("box", [16, 64, 128])
@pytest.mark.parametrize("split_k", [1, 3], ids=str)
def test_compiles_without_spills(box: int, split_k: int, tmp_path: Path) -> None:
    specs = [WqSpec(4, 2816, 128, True), WqSpec(4, 2816, 128, False), WqSpec(8, 2816, 128, True)]
    specs += [
        WqSpec(8, 2048, 32, True),
        WqSpec(8, 2816, 64, False),
        WqSpec(8, 2816, 2816, False, True),
        WqSpec(4, 2048, 32, True),
        WqSpec(4, 2816, 64, False),
    ]
    pairs = list(itertools.product((torch.bfloat16, torch.float16), (True, False)))
    for spec, (dtype, gated) in zip(specs, 2 * pairs):
        assert wq_gemm_pipelined.fits_shared_memory(split_k, spec, box)
        macros = wq_gemm_pipelined.kernel_macros(dtype, split_k, spec, box, gated=gated)
        # a gated end in float16 puts one word away, behind the loop
        most = 4 if gated and dtype is torch.float16 and split_k > 2 else 0
        compiles_without_spills("wq_gemm_pipelined.cu", macros, tmp_path / "out", most)


def _random_args(spec: WqSpec, rows: int, seed: int) -> dict[str, torch.Tensor | int | None]:
    names = ("weight", "scale", "offset", "group")
    made = random_codes(spec.bits, rows, spec.columns, spec.group, offset=spec.offset, seed=seed)
    return dict(zip(names, made))


def _check(
    x: torch.Tensor,
    args: dict,
    split_k: int,
    bias: torch.Tensor | None,
    *,
    gated: bool,
) -> None:
    inputs = GroupwiseLinearInputs(x, *args.values(), bias)
    torch.use_deterministic_algorithms(True, warn_only=True)  # makes torch.empty fill with NaN
    try:
        actual = wq_gemm_pipelined.wq_gemm(inputs, split_k, gated=gated)
    finally:
        torch.use_deterministic_algorithms(False)
    wide = {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in args.items()
    }
    op = int4_linear if args["weight"].dtype is torch.uint8 else int8_group_linear.int8_group_linear
    wide_bias = None if bias is None else bias.double()
    truth = op(GroupwiseLinearInputs(x.double(), **wide, bias=wide_bias))
    if gated:
        gate, up = truth.to(x.dtype).double().chunk(2, 1)
        truth = gate / (1 + torch.exp(-gate)) * up
    assert not actual.isnan().any()
    assert float((actual.double() - truth).norm() / truth.norm()) < LIMIT[x.dtype]
    again = wq_gemm_pipelined.wq_gemm(inputs, split_k, gated=gated)
    assert torch.equal(again, actual), "the bits change from call to call"


@pytest.mark.gpu
@requires_cuda_kernels
@pytest.mark.parametrize("split_k", wq_gemm_pipelined.SPLIT_K_CHOICES, ids=str)
@pytest.mark.parametrize("large", [False, True], ids=["up-to-64-rows", "more"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_form(split_k: int, dtype: torch.dtype, bits: int, large: bool) -> None:
    shapes = [
        (9, 136, 2048, 128),
        (64, 400, 2080, 128),
        (33, 4096, 4096, 256),
        (64, 1024, 11008, 128),
    ]
    shapes += (
        [(40, 16, 4128, 1 << 20), (64, 400, 2080, 32), (17, 208, 4160, 64)]
        if bits == 4
        else [(2, 144, 4128, 32), (64, 400, 2080, 32), (17, 208, 4160, 64)]
    )
    if large:  # one block of rows of x that it fills in part, and several
        shapes = [(65 + 100 * number, *shape[1:]) for number, shape in enumerate(shapes)]
    for (tokens, rows, columns, group), gated in itertools.product(shapes, (False, True)):
        spec = WqSpec(bits, columns, group, offset=not gated or tokens in (64, 165))
        padded = wq_gemm_pipelined.block_rows(tokens)
        if not wq_gemm_pipelined.fits_shared_memory(split_k, spec, padded):
            continue
        args = _random_args(spec, rows, seed=tokens)
        biased = tokens in (33, 265)
        bias = torch.randn(rows, device="cuda", dtype=dtype) if biased else None
        x = torch.randn(tokens, columns + 64, device="cuda", dtype=dtype)[:, :columns]
        _check(x, args, split_k, bias, gated=gated)
        x = x.abs() if not gated else x
        x[:, 7] *= 30
        _check(x, args, split_k, bias, gated=gated)


@pytest.mark.gpu
def test_wide_rows_of_many_groups_are_served() -> None:
    """64 rows of x leave the kernel of a few no room for 344 groups of 64 rows of the weight: this
    one serves them.
    """
    args = _random_args(WqSpec(8, 11008, 32, offset=False), 256, seed=1)
    for tokens in (8, 64):
        x = torch.randn(tokens, 11008, device="cuda", dtype=torch.bfloat16)
        assert registry.backend_serves_args("int8_group_linear", "cuda", x=x, **args)
        problem = make_groupwise_problem(*GroupwiseLinearInputs(x, **args))
        pipelined = [
            each.range.covers(problem)
            for each in int8_gemm_small_m.list_kernels_by_preference(gated=False)
            if getattr(each.run, "func", None) is wq_gemm_pipelined.groupwise_gemm
        ]
        assert any(pipelined)
        ring = wq_gemm_pipelined.problem_split_k(problem, gated=False)
        if any(pipelined) and ring is not None:
            _check(x, args, ring, None, gated=False)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["int4_linear", "int8_group_linear"])
def test_prompts_are_multiplied_by_the_codes(op: str) -> None:
    bits = 4 if op == "int4_linear" else 8
    args = _random_args(WqSpec(bits, 4096, 128, offset=True), 4096, seed=bits)
    for tokens in (65, 128, 129, 192, 193, 768):
        x = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16)
        inputs = GroupwiseLinearInputs(x, **args)
        kernel = wq_gemm_pipelined if tokens <= 128 else wq_gemm_large_m
        expected = kernel.groupwise_gemm(inputs, gated=False)
        actual = getattr(registry.select_backends("cuda"), op)(inputs)
        assert torch.equal(actual, expected), tokens


@pytest.mark.gpu
def test_the_backend_serves_small_groups_and_odd_rows() -> None:
    run = registry.select_backends("cuda").int4_linear
    for rows, columns, group in (
        (100, 2048, 128),
        (4096, 2048, 64),
        (4096, 1024, 32),
        (4096, 4096, 128),
    ):
        args = _random_args(WqSpec(4, columns, group, offset=True), rows, seed=rows)
        x = torch.randn(40, columns, device="cuda", dtype=torch.bfloat16)
        wide = {
            k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for k, v in args.items()
        }
        truth = int4_linear(GroupwiseLinearInputs(x.double(), **wide))
        result = run(GroupwiseLinearInputs(x, **args)).double()
        assert float((result - truth).norm() / truth.norm()) < LIMIT[x.dtype]
