"""Launch configs that an engine uses at start-up, and the messages about them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.artifact.autotune_store import (
    AutotuneRecord,
    autotune_record_path,
    encode_autotune_record,
)
from modelmill.loader.tuned_launch_configs import load_tuning, look_up_tuning

pytest.importorskip("triton")
H200, A100 = "NVIDIA H200", "NVIDIA A100-SXM4-80GB"
CHOICES = {
    "linear": {"1x4096->4096 bfloat16": (4, 1024, 4)},
    "int8_linear": {"8x64->64 float16": (16, 64, 128, 4, 4)},
}


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return tmp_path


def store(engine: Path, choices: Any, device: str = H200) -> None:
    path = engine / autotune_record_path(device)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(encode_autotune_record(AutotuneRecord(device, choices, {})))


def test_this_device_gets_its_choice(engine: Path) -> None:
    store(engine, CHOICES)
    lookup = look_up_tuning(engine, H200)
    assert lookup.tuning is not None
    assert lookup.tuning.configs["linear"] == {(1, 4096, 4096, torch.bfloat16): (4, 1024, 4)}
    assert lookup.tuning.count == 2
    assert not lookup.is_warning


def test_another_device_gets_defaults_and_a_note(engine: Path) -> None:
    store(engine, CHOICES)
    lookup = look_up_tuning(engine, A100)
    assert lookup.tuning is None
    assert lookup.is_warning
    assert A100 in lookup.message
    assert H200 in lookup.message
    assert "modelmill build" in lookup.message
    assert "\n" not in lookup.message


def test_an_engine_never_tuned_is_nothing_odd(engine: Path) -> None:
    lookup = look_up_tuning(engine, H200)
    assert (lookup.tuning, lookup.is_warning) == (None, False)
    assert "no tuning" in lookup.message


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", encode_autotune_record(AutotuneRecord(H200, {"linear": {"what": (1,)}}, {}))],
)
def test_a_damaged_file_means_defaults(engine: Path, content: bytes) -> None:
    store(engine, CHOICES)
    (engine / autotune_record_path(H200)).write_bytes(content)
    lookup = look_up_tuning(engine, H200)
    assert lookup.tuning is None
    assert lookup.is_warning
    assert "damaged" in lookup.message


def test_sizes_that_no_kernel_offers_are_left_out(engine: Path) -> None:
    wild = {
        "linear": {"1x4096->4096 bfloat16": (4, 1024, 4), "1x64->64 bfloat16": (64, 1 << 19, 32)},
        "gone": {},
    }
    store(engine, wild)
    lookup = look_up_tuning(engine, H200)
    assert lookup.tuning is not None
    assert lookup.tuning.count == 1
    assert lookup.is_warning
    assert "1 that this version does not support" in lookup.message


def test_a_start_logs_one_line(
    engine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store(engine, CHOICES)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: A100)
    with caplog.at_level(logging.INFO):
        assert load_tuning(engine, "cuda:0") is None
        assert load_tuning(engine, "cpu") is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
