"""Profiles of a tiny engine's steps, and lines made of kernels that are made up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from modelmill.core.errors import CapacityError, UsageError
from modelmill.eval import profile as profiling
from modelmill.eval.chrome_trace import make_trace
from modelmill.eval.kernel_trace import KernelRecord, with_gap_and_added_times
from modelmill.eval.profile import ProfileCase, make_profile_step, profile_case
from modelmill.eval.profile_lines import gpu_trace_tracks, kernel_lines, roofline_step_us
from modelmill.eval.roofline import RooflineCeilings
from modelmill.ops.op_cost import OpCost
from tests.eval.test_chrome_trace import check_trace
from tests.runtime.tiny import make_engine

CEILINGS = RooflineCeilings("cpu", 1e9, {"float32": 1e9})


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "CPU_ROUNDS", 3)
    monkeypatch.setattr(profiling, "CPU_WARMUP_ROUNDS", 0)


@pytest.mark.parametrize("phase", profiling.PHASES)
def test_a_step_is_reported_op_by_op(phase: str) -> None:
    # no op that spans others
    engine = make_engine(kernels=dict.fromkeys(("linear", "silu_mul"), "torch"))
    profile, tracks = profile_case(engine, ProfileCase(phase, 2, 24), CEILINGS)
    lines = {(line.module, line.op): line for line in profile.lines}
    assert {op for _, op in lines} == {
        *(
            "rms_norm",
            "add_rms_norm",
            "linear",
            "rope_cos_sin",
            "rope_cache",
            "paged_attention",
            "silu_mul",
        )
    }
    qkv = lines["layers.*.attn.qkv_proj", "linear"]
    tokens = 2 if phase == "decode" else 2 * 24
    assert qkv.calls == 2
    assert qkv.operations == 2 * 2 * tokens * 32 * 64
    assert qkv.floor_us == pytest.approx(max(qkv.nbytes or 0, qkv.operations) / 1e9 * 1e6)
    assert qkv.fraction == pytest.approx(qkv.floor_us / qkv.us)
    assert sum(
        line.share for line in profile.lines
    ) + profile.gap_us / profile.seen_us == pytest.approx(1.0)
    assert [line.us for line in profile.lines] == sorted(
        (line.us for line in profile.lines), reverse=True
    )
    assert 0 < profile.floor_us < sum(line.floor_us or 0 for line in profile.lines)
    assert profile.inside == ()
    check_trace(make_trace({phase: tracks}, {}))
    names = {event.name for event in tracks["modules and ops"]}
    assert {"embed", "layers.0", "layers.0.attn.qkv_proj", "linear", "paged_attention"} <= names


def test_all_layers_in_one_op_are_one_line_and_what_is_inside() -> None:
    engine = make_engine()
    if engine.ops.decode is None:
        pytest.skip("needs a C++ compiler: apt-get install g++")
    profile, _ = profile_case(engine, ProfileCase("decode", 1, 24), CEILINGS)
    assert {(line.module, line.op) for line in profile.lines} == {
        ("", "decode"),
        ("rotary", "rope_cos_sin"),
    }
    assert ("layers.*.attn.core", "paged_attention") in {
        (line.module, line.op) for line in profile.inside
    }
    products = sum(line.operations or 0 for line in profile.inside)
    assert max(line.operations or 0 for line in profile.lines) == products


def test_an_engine_answers_as_before_after_a_profile() -> None:
    from tests.runtime.tiny import prompts, requests, run

    engine = make_engine(enable_prefix_caching=False)
    before = run(engine, requests(prompts(3)))
    profile_case(engine, ProfileCase("decode", 2, 30), CEILINGS)
    assert run(engine, requests(prompts(3))) == before


@pytest.mark.parametrize(
    ("work", "error"),
    [
        (ProfileCase("decode", 1, 128), UsageError),
        (ProfileCase("prefill", 3, 32), UsageError),
        (ProfileCase("decode", 9, 16), CapacityError),
    ],
    ids=["too long", "no single step", "too many pages"],
)
def test_a_step_that_does_not_fit_is_one_line(work: ProfileCase, error: type[Exception]) -> None:
    with pytest.raises(error) as raised:
        make_profile_step(make_engine(pages=16), work)
    assert "\n" not in str(raised.value)


def kernels() -> list[KernelRecord]:
    """Two layers: a product of two kernels, an attention; then a kernel without a known op."""
    product, split, mix = "layers.{}.mlp", "layers.{}.mlp", "layers.{}.attn.core"
    records: list[KernelRecord] = []
    for layer in range(2):
        at = layer * 100.0
        calls: list[tuple[str, str, int]] = [
            (product.format(layer), "linear", 0),
            (split.format(layer), "linear", 0),
            (mix.format(layer), "paged_attention", 0),
        ]
        times = ((0.0, 40.0, "gemv"), (35.0, 15.0, "splitk"), (60.0, 40.0, "attend"))
        records += [
            KernelRecord(name, at + begins, lasts, call)
            for (begins, lasts, name), call in zip(times, calls)
        ]
    return with_gap_and_added_times([*records, KernelRecord("argmax", 200.0, 5.0)])


def test_kernels_become_lines_with_the_floor_of_their_op() -> None:
    counts: dict[Any, OpCost] = {}
    for layer in range(2):
        counts[f"layers.{layer}.mlp", "linear", 0] = OpCost(20_000, 15_000, 10_000)
        counts[f"layers.{layer}.attn.core", "paged_attention", 0] = OpCost(5_000, 5_000, 30_000)
    lines = {line.kernel: line for line in kernel_lines(kernels(), counts, CEILINGS, "float32")}
    assert lines["gemv"].us == 80
    assert lines["splitk"].us == 20
    assert lines["gemv"].floor_us == pytest.approx(40.0)
    assert lines["gemv"].fraction == pytest.approx(40 / 100)  # of both kernels' time
    assert lines["splitk"].floor_us is None
    assert lines["attend"].floor_us == pytest.approx(60.0)  # the operations
    assert lines["argmax"].module == ""
    assert lines["argmax"].floor_us is None
    assert sum(line.share for line in lines.values()) == pytest.approx((80 + 20 + 80 + 5) / 205)
    assert roofline_step_us(counts.values(), CEILINGS, "float32") == pytest.approx(80.0)
    assert roofline_step_us(counts.values(), CEILINGS, "float16") == pytest.approx(40.0)


def test_the_trace_of_kernels_has_layers_beside_them() -> None:
    tracks = gpu_trace_tracks(kernels(), {})
    check_trace(make_trace({"decode": tracks}, {}))
    assert [event.name for event in tracks["layers"]] == ["layers.0", "layers.1", "(other)"]
    assert len(tracks["kernels"]) == 7


@pytest.mark.gpu
def test_kernels_of_a_graph_are_recorded_and_named() -> None:
    """On a GPU: the replay's kernels are those of the ops, each with its floor."""
    from modelmill.eval.roofline import measure_roofline
    from tests.runtime.tiny import decoder

    engine = make_engine(decoder(device="cuda"))
    ceilings = measure_roofline("cuda", [torch.float32])
    for phase in profiling.PHASES:
        profile, tracks = profile_case(engine, ProfileCase(phase, 2, 24), ceilings)
        assert profile.how == ("graph" if phase == "decode" else "launched")
        ops = {line.op for line in profile.lines}
        assert {"linear", "paged_attention", "rope_cache"} <= ops
        known = sum(line.us for line in profile.lines if line.op)
        assert known > 0.5 * sum(line.us for line in profile.lines)
        check_trace(make_trace({phase: tracks}, {}))
