"""The benchmark of Segment Anything, with a model of two narrow layers."""

from __future__ import annotations

import dataclasses
import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import sam, sam_peer


def test_a_click_and_an_embedding_become_rows() -> None:
    spec = sam.SamVitSpec(width=32, depth=2, heads=2, global_attn_indexes=(1,), inner=32)
    side = sam.modelmill_side("bfloat16", spec, "cpu", {})
    with torch.inference_mode():
        (row,) = sam.encoder_rows([side], [1], 1)
        assert row["images_per_s"] == round(1e3 / row["value"], 2)
        click = sam.click_row(side, 2)
    assert click["work"] == "click"
    assert click["spread"]["runs"] == 2
    assert click["spread"]["min"] <= click["value"] <= click["spread"]["max"]


def test_a_dry_run_keeps_one_layer_of_the_whole_picture() -> None:
    assert sam.vit_h_spec(None) is sam.VIT_H
    assert (sam.vit_h_spec(3).depth, sam.vit_h_spec(3).global_attn_indexes) == (3, (2,))


def test_pictures_differ_by_seed() -> None:
    first, again, other = (sam.random_image(seed) for seed in (0, 0, 1))
    assert first.shape == (1200, 1800, 3)
    assert (first == again).all()
    assert (first != other).any()


FAKE_FAST = {
    "__init__": "from .build_sam import build_sam\n",
    "build_sam": """
import types
import torch

def build_sam(): ...

def _build_sam(width, depth, heads, indexes):
    encoder = torch.nn.Conv2d(3, depth, 256, stride=256)
    return types.SimpleNamespace(image_encoder=encoder)

def _apply_eval_dtype_sam(sam, dtype):
    sam.image_encoder = sam.image_encoder.eval().to(dtype)
    return sam
""",
    "flash_4": """
import os

USE_CUSTOM_KERNEL = bool(int(os.environ.get("SEGMENT_ANYTHING_FAST_USE_FLASH_4", 1)))
BEST_CONFIGS = {"key": (128, 64, 8, 1)} if USE_CUSTOM_KERNEL else None

def _autotune(configs, function): ...
""",
}
SPEC = sam.SamVitSpec(width=32, depth=2, heads=2, global_attn_indexes=(1,), inner=128)


@pytest.fixture
def fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options for a checkout of segment-anything-fast that is none; torch.compile does nothing."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    package = tmp_path / "fast" / "segment_anything_fast"
    package.mkdir(parents=True)
    for name, text in FAKE_FAST.items():
        (package / f"{name}.py").write_text(text)
    folder = ["--segment-anything-fast", str(package.parent), "--work", str(tmp_path / "work")]
    return [*folder, "--works", "encoder", "--rounds", "1"]


def test_a_compiled_side_has_a_process_for_each_batch(fast: list[str]) -> None:
    options = sam.parse_args([*fast, "--sides", "segment-anything-fast"])
    with sam.compiled_sides(["segment-anything-fast"], SPEC, [1, 2], options) as sides:
        assert [side.batch for side in sides] == [1, 2]
        rows = sam.encoder_rows(sides, [1, 2], 1)
    assert [(row["subject"], row["batch"]) for row in rows] == [
        ("segment-anything-fast", 1), ("segment-anything-fast", 2),
    ]  # fmt: skip
    facts = rows[0]["facts"]
    assert (facts["compile_mode"], facts["cudagraph_skips"]) == ("max-autotune", 0)
    assert facts["flash_4"] == ["(128, 64, 8, 1)"], "what its own search took"
    assert all(len(row["calls_s"]) == 1 for row in rows)


def test_a_checkout_of_it_makes_it_a_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sam.parse_args([]).sides == "bfloat16,fp8,smoothquant,transformers"
    monkeypatch.setattr(sam.importlib.util, "find_spec", lambda name: None)
    sides = "bfloat16,fp8,transformers,transformers-max-autotune,segment-anything-fast"
    fast = ["--segment-anything-fast", str(tmp_path)]
    assert sam.parse_args(fast).sides == sides
    monkeypatch.setattr(sam.importlib.util, "find_spec", lambda name: name)
    assert sam.parse_args(fast).sides == f"{sides},segment-anything-fast-int8", "torchao is there"


def test_its_own_attention_is_switched_off_by_its_own_variable() -> None:
    off = {"SEGMENT_ANYTHING_FAST_USE_FLASH_4": "0"}
    assert sam_peer.side_environment("segment-anything-fast-sdpa") == off
    assert sam_peer.side_environment("segment-anything-fast") == {}


def test_without_a_peer_that_fails_the_others_are_measured(
    fast: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = sam.parse_args([*fast, "--sides", "segment-anything-fast"])
    narrow = dataclasses.replace(SPEC, inner=32)
    with sam.compiled_sides(["segment-anything-fast"], narrow, [1], options) as sides:
        assert sides == []
    assert "four times as wide" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sides", "error"),
    [
        ("segment-anything-fast", "needs --segment-anything-fast DIR"),
        ("bfloat16,transformers-fastest", "transformers-max-autotune"),
    ],
)
def test_a_side_that_is_not_known_or_not_there_is_refused(
    sides: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        sam.parse_args(["--sides", sides])
    assert error in capsys.readouterr().err


def test_candidates_are_compiled_before_the_search_that_times_them(tmp_path: Path) -> None:
    compiled: list[int] = []

    def launch(number: int) -> None:
        compiled.append(number)
        if number == 2:
            raise RuntimeError("it does not fit")

    def search(configs: list[tuple[int]], function: Callable[[int], None]) -> tuple[int]:
        assert sorted(compiled) == [1, 2, 3]
        function(*configs[0])
        return configs[0]

    autotune = sam_peer.compile_candidates_at_once(search, tmp_path / "lock")
    assert autotune([(3,), (1,), (2,)], launch) == (3,)
    assert compiled[-1] == 3


def test_a_lock_is_free_again_after_its_use(tmp_path: Path) -> None:
    for _ in range(2):
        with (
            sam_peer.exclusive(tmp_path / "lock"),
            (tmp_path / "lock").open("a") as other,
            pytest.raises(BlockingIOError),
        ):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_torch_compiles_candidates_without_the_lock_and_times_them_under_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.runtime import benchmarking

    locked_calls: list[bool] = []

    def candidate() -> None:
        with (tmp_path / "lock").open("a") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                locked_calls.append(True)
            else:
                locked_calls.append(False)
        if len(locked_calls) > 2:
            raise RuntimeError("it does not fit")

    class Timer:
        def benchmark_gpu(self, call: Callable[[], None], rep: int) -> int:
            call()
            return rep

    monkeypatch.setattr(benchmarking, "benchmarker", Timer())
    sam_peer.time_candidates_in_turn(tmp_path / "lock")
    assert benchmarking.benchmarker.benchmark_gpu(candidate, rep=7) == 7
    assert locked_calls == [False, True]
    with pytest.raises(RuntimeError, match="does not fit"):
        benchmarking.benchmarker.benchmark_gpu(candidate, rep=7)
