"""Timing of ops against ceilings: every op of the registry, the figures, and failures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelmill.eval import op_bench
from modelmill.eval.op_bench import (
    OpBenchSelection,
    OpTiming,
    bench_ops,
    make_argument_sets,
    runnable_implementations,
    with_time_and_roofline,
)
from modelmill.eval.op_cases import EXTRA_CASE_MAKERS, bench_cases
from modelmill.eval.roofline import RooflineCeilings, measure_roofline
from modelmill.ops import registry
from modelmill.ops.case import Case
from tests.hypothesis_examples import examples

CEILINGS = RooflineCeilings("cpu", 10e9, {"float32": 100e9})
POSITIVE = st.floats(1.0, 1e12)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small case an op, few copies, small ceilings."""
    monkeypatch.setattr(
        op_bench,
        "bench_cases",
        lambda op, device_type, dtype: [next(iter(bench_cases(op, device_type, dtype)))],
    )
    monkeypatch.setattr(op_bench, "CACHE_FLUSH_BYTES", {"cpu": 1 << 16, "cuda": 1 << 16})
    monkeypatch.setattr(op_bench, "MIN_TIMING_ROUNDS", 1)
    monkeypatch.setattr(
        "modelmill.ops.timing.BANDWIDTH_COPY_BYTES", {"cpu": 1 << 16, "cuda": 1 << 16}
    )
    monkeypatch.setattr("modelmill.ops.timing.MATMUL_SIZE", {"cpu": 32, "cuda": 32})
    # other tests may have chosen Triton's interpreter, which takes minutes to be timed
    pytest.importorskip("triton")
    monkeypatch.setattr("modelmill.ops.triton.common.device.INTERPRETED", False)


def test_every_op_of_the_registry_is_timed(quick: None) -> None:
    results = list(
        bench_ops(
            measure_roofline("cpu", [torch.float32]), torch.float32, OpBenchSelection(rounds=2)
        )
    )
    assert {each.op for each in results} == set(registry.op_names())
    assert not [each for each in results if each.failed]
    for each in results:
        assert each.us is not None
        assert each.us.median > 0
        assert each.fraction is None or each.fraction > 0
    for op in (op for op, each in registry.op_declarations().items() if not each.fuses):
        assert [each.op for each in results if each.op == op and each.chosen] == [op]


def test_only_what_is_wanted_is_timed(quick: None) -> None:
    selection = OpBenchSelection(ops=("rms_norm", "linear"), implementations=("torch",), rounds=1)
    results = list(bench_ops(measure_roofline("cpu", [torch.float32]), torch.float32, selection))
    assert [(each.op, each.variant) for each in results] == [
        ("linear", "torch"),
        ("rms_norm", "torch"),
    ]
    assert list(bench_ops(CEILINGS, torch.float32, OpBenchSelection(case="no such case"))) == []


def test_the_fraction_is_the_floor_over_the_time() -> None:
    """10 GB/s, 100 GFLOP/s: 1 MB takes 100 µs, 2 MFLOP 20 µs; of a call of 200 µs the floor is a
    half.
    """
    base = OpTiming("linear", "x", "float32", "torch", True, "graph")
    result = with_time_and_roofline(
        base, Case("x", {}, 1_000_000, 2_000_000), [300e-6, 200e-6, 150e-6], CEILINGS
    )
    assert result.fraction == pytest.approx(0.5)
    assert result.bound == "memory"
    assert result.gbps == pytest.approx(5.0)
    assert result.tflops == pytest.approx(0.01)
    many = with_time_and_roofline(base, Case("x", {}, 1_000_000, 40_000_000), [800e-6], CEILINGS)
    assert (many.bound, many.fraction) == ("products", pytest.approx(0.5))
    best = with_time_and_roofline(
        OpTiming("linear", "x", "float32", "torch", True, "host"),
        Case("x", {}, 1_000_000),
        [200e-6, 125e-6],
        CEILINGS,
    )
    assert best.fraction == pytest.approx(0.8)


def test_products_of_8_bits_have_a_ceiling_of_their_own() -> None:
    """100 Gop/s in float32, 400 in int8: 40 Mop take 100 µs there, and 400 where the int8 rate is
    not known.
    """
    base = OpTiming("w8a8_linear", "x", "float32", "cuda", True, "graph")
    case = Case("x", {"x": torch.ones(2, 2, dtype=torch.int8)}, 1000, 40_000_000)
    both = RooflineCeilings("cuda", 10e9, {"float32": 100e9, "int8": 400e9})
    assert with_time_and_roofline(base, case, [200e-6], both).fraction == pytest.approx(0.5)
    assert with_time_and_roofline(base, case, [800e-6], CEILINGS).fraction == pytest.approx(0.5)
    wide = Case("x", {"x": torch.ones(2, 2)}, 1000, 40_000_000)
    assert with_time_and_roofline(base, wide, [800e-6], both).fraction == pytest.approx(0.5)


def test_what_is_8_bits_of_a_sum_takes_its_own_time() -> None:
    roofline = RooflineCeilings("cuda", 1e9, {"float32": 100.0, "int8": 400.0})
    assert roofline.min_seconds(0, 500, "float32", {"int8": 400}) == pytest.approx(2.0)
    assert roofline.min_seconds(0, 500, "float32", {"float8_e4m3fn": 400}) == pytest.approx(5.0)
    assert roofline.min_seconds(0, 400, "float16", {"int8": 400}) == pytest.approx(1.0)
    assert RooflineCeilings("cuda", 1e9, {"float32": 0.0}).min_seconds(2e9, 0, "float32") == 2.0, (
        "a rate that is not known"
    )
    assert roofline.limiting_resource(3e9, 500, "float32", {"int8": 400}) == "memory"
    assert roofline.limiting_resource(1e9, 500, "float32", {"int8": 400}) == "products"


@pytest.mark.gpu
def test_a_gpu_has_rates_of_8_bits() -> None:
    """Of the order of that of 16 bits: a neighbour on the GPU may slow any of them. GPUs before 8.9
    multiply no fp8.
    """
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU that multiplies fp8")
    roofline = measure_roofline("cuda", [torch.bfloat16])
    assert set(roofline.matmul_rates) == {"bfloat16", "int8", "float8_e4m3fn"}
    for dtype in ("int8", "float8_e4m3fn"):
        assert 0.5 < roofline.matmul_rates[dtype] / roofline.matmul_rates["bfloat16"] < 4


def test_what_counts_no_bytes_has_no_fraction() -> None:
    result = with_time_and_roofline(
        OpTiming("decode", "x", "float32", "cpu", True, "host"), Case("x", {}), [1e-3], CEILINGS
    )
    assert (result.fraction, result.gbps, result.bound) == (None, None, None)


@given(POSITIVE, POSITIVE, st.floats(1.0, 1e9), st.floats(1.0, 1e9))
def test_a_floor_is_the_larger_of_two_times(
    memory: float, products: float, nbytes: float, operations: float
) -> None:
    roofline = RooflineCeilings("cpu", memory, {"float32": products})
    floor = roofline.min_seconds(nbytes, operations, "float32")
    assert floor == max(nbytes / memory, operations / products)
    assert roofline.min_seconds(nbytes, operations, "int4") == nbytes / memory
    assert (floor == nbytes / memory) == (
        roofline.limiting_resource(nbytes, operations, "float32") == "memory"
    )


def test_copies_leave_the_cache_and_share_nothing() -> None:
    case = next(iter(bench_cases("linear", "cpu", torch.float32)))
    sets = make_argument_sets(case, "cpu")
    assert (
        sum(each["weight"].nbytes + each["x"].nbytes for each in sets)
        >= op_bench.CACHE_FLUSH_BYTES["cpu"]
    )
    assert len({each["weight"].data_ptr() for each in sets}) == len(sets)
    assert all(torch.equal(each["weight"], case.args["weight"]) for each in sets)


def test_a_kernel_that_fails_is_reported_and_the_others_are_timed(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**args: Any) -> None:
        raise RuntimeError("out\nof order")

    real = runnable_implementations
    monkeypatch.setattr(
        op_bench, "runnable_implementations", lambda *args: {**real(*args), "odd": broken}
    )
    results = list(
        bench_ops(
            measure_roofline("cpu", [torch.float32]),
            torch.float32,
            OpBenchSelection(ops=("rms_norm",), rounds=1),
        )
    )
    assert {each.variant: each.failed for each in results}["odd"] == "RuntimeError: out of order"
    assert [each for each in results if each.variant == "torch" and each.us]


@pytest.mark.parametrize(
    ("serve", "expected"),
    [
        (("torch", "cpu"), "cpu"),
        (("torch", "triton"), "triton"),
        (("torch", "cuda", "triton"), "cuda"),
        (("torch",), "torch"),
    ],
    ids=str,
)
def test_what_is_picked_is_the_first_that_serves(
    quick: None, monkeypatch: pytest.MonkeyPatch, serve: tuple[str, ...], expected: str
) -> None:
    """A picked variant that does not serve a case leaves it to those behind it, as the registry
    does.
    """
    monkeypatch.setattr(registry, "BACKEND_PREFERENCE", {"cpu": ("cuda", "triton", "cpu", "torch")})
    monkeypatch.setattr(
        op_bench,
        "runnable_implementations",
        lambda op, *rest: dict.fromkeys(serve, registry.reference(op)),
    )
    case = next(iter(bench_cases("rms_norm", "cpu", torch.float32)))
    results = op_bench.time_case(
        "rms_norm", case, torch.float32, CEILINGS, OpBenchSelection(rounds=1), "cuda"
    )
    assert [each.variant for each in results if each.chosen] == [expected]


@pytest.mark.parametrize("device", EXTRA_CASE_MAKERS)
def test_the_extra_shapes_belong_to_ops_of_the_registry(device: str) -> None:
    assert set(EXTRA_CASE_MAKERS[device]) <= set(registry.op_names())


def test_extra_cases_are_right_for_their_ops() -> None:
    """Every shape for a CPU runs through its reference, but for the head, which only takes time; in
    ``make test`` an op's smallest.
    """
    with torch.inference_mode():
        for op, make in EXTRA_CASE_MAKERS["cpu"].items():
            cases = sorted(make("cpu", torch.float32), key=lambda case: case.bytes_moved)
            for number, case in enumerate(cases):
                is_short = "49152" not in case.name and "4096" not in case.name
                if is_short and number < examples(full=len(cases), quick=1):
                    registry.adapt_to_named_args(op, registry.reference(op))(**case.args)
                assert case.bytes_moved > 0
