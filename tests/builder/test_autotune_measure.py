"""Tuning of a plan: what is watched, what is written, and when it is left alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.artifact.autotune_store import encode_autotune_record, read_autotune_record
from modelmill.builder import autotune_measure
from modelmill.builder.autotune_search import AutotuneOutcome
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig
from modelmill.nn.synthetic_step import fill_random_weights, synthetic_step
from modelmill.ops import registry
from tests.models.tiny_models import save_hf
from tests.runtime.tiny import decoder

H200 = "NVIDIA H200"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_hf("llama", tmp_path / "hf")
    return tmp_path / "hf"


def plan(folder: Path, **options: Any) -> Any:
    return make_build_plan(open_checkpoint(folder), BuildConfig(**options))


def test_a_cpu_has_nothing_to_tune(folder: Path) -> None:
    assert "CPU" in str(autotune_measure.autotune_skip_reason(plan(folder, target="cpu")))
    assert autotune_measure.autotune(plan(folder, target="cpu")) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_tuned_and_it_says_so(folder: Path) -> None:
    assert "no GPU here" in str(autotune_measure.autotune_skip_reason(plan(folder, target="cuda")))
    assert autotune_measure.autotune(plan(folder, target="cuda")) is None


def test_a_tiny_model_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    small = replace(plan(folder, target="cpu"), config=BuildConfig(target="cuda", dtype="bfloat16"))
    assert "MiB" in str(autotune_measure.autotune_skip_reason(small))


def test_no_build_fails_for_want_of_tuning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*rest: Any) -> None:
        raise KeyError("no such kind of weight")

    monkeypatch.setattr(autotune_measure, "autotune_skip_reason", lambda plan: None)
    monkeypatch.setattr(autotune_measure, "_tune_all_row_counts", broken)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert autotune_measure.autotune(plan(folder, target="cpu")) is None
    assert [record.message for record in caplog.records] == [
        "autotuning failed: 'no such kind of weight'"
    ]


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    choices = {"linear": {(8, 64, 128, torch.bfloat16): (16, 64, 128, 4, 4)}}
    outcomes = {1: AutotuneOutcome({}, 1e-3, 1e-3), 8: AutotuneOutcome(choices, 2e-3, 1.5e-3, 2)}
    stored = autotune_measure.make_autotune_record(H200, outcomes, 12.34)
    path = tmp_path / "tuning" / "nvidia-h200.json"
    path.parent.mkdir()
    path.write_bytes(encode_autotune_record(stored))
    assert read_autotune_record(tmp_path, H200) == stored
    assert stored.choices == {"linear": {"8x128->64 bfloat16": (16, 64, 128, 4, 4)}}
    assert stored.facts["steps"]["8"] == {"default_us": 2000.0, "tuned_us": 1500.0, "untried": 2}


def test_the_products_of_a_step_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through Triton's interpreter: two layers' products and the head, each with its share."""
    pytest.importorskip("triton")
    module = registry.implementations("linear")["triton"]
    if module.unavailable_reason("cpu") is not None:
        pytest.skip("TRITON_INTERPRET is not set")
    monkeypatch.setattr(module, "candidates", lambda key: ((1,), (2,)))
    ops = registry.select_backends("cpu", {"linear": "triton", "paged_attention": "torch"})
    model = decoder()
    gemms = autotune_measure.find_tunable_gemms(model, synthetic_step(model, ops, (1, 1, 20)))
    shapes = {each.key[1:3] for each in gemms}
    assert shapes == {(64, 32), (32, 32), (96, 32), (32, 48), (97, 32)}
    assert sum(each.time_share for each in gemms) == pytest.approx(1.0)
    layers = 2 * (64 * 32 + 32 * 32 + 96 * 32 + 32 * 48)
    head = next(each for each in gemms if each.key[1] == 97)
    assert head.time_share == pytest.approx(97 * 32 / (layers + 97 * 32))


def test_weights_are_drawn_and_never_zero() -> None:
    from modelmill.nn.decoder import Decoder

    model = fill_random_weights(
        Decoder(replace(decoder().config, layers=3)), {"head": "int8"}, torch.float32, "cpu"
    )
    assert len(model.layers) == 3  # type: ignore[arg-type]
    assert model.head.weight.format == "int8"  # type: ignore[union-attr]
    assert all(bool((buffer != 0).any()) for name, buffer in model.named_buffers())
    ops = registry.select_backends("cpu")
    for shape in ((2, 1, 40), (1, 12, 30)):
        logits = model(synthetic_step(model, ops, shape, max_context=64))
        assert logits.shape == (shape[0], 97)
        assert bool(torch.isfinite(logits).all())
