"""Which launch sizes a start uses, and what it says about them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.artifact.tuning import StoredTuning, path_of, to_bytes
from modelmill.runtime.tuned import look, tuning_for

pytest.importorskip("triton")
H200, A100 = "NVIDIA H200", "NVIDIA A100-SXM4-80GB"
CHOICES = {"linear": {"1x4096->4096 bfloat16": (4, 1024, 4)}, "int8_linear": {"8x64->64 float16": (16, 64, 128, 4, 4)}}


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return tmp_path


def store(engine: Path, choices: Any, device: str = H200) -> None:
    path = engine / path_of(device)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(to_bytes(StoredTuning(device, choices, {})))


def test_this_device_gets_its_choice(engine: Path) -> None:
    store(engine, CHOICES)
    found = look(engine, H200)
    assert found.tuning is not None
    assert found.tuning.choices["linear"] == {(1, 4096, 4096, torch.bfloat16): (4, 1024, 4)}
    assert found.tuning.count == 2
    assert not found.odd


def test_another_device_gets_defaults_and_is_told(engine: Path) -> None:
    store(engine, CHOICES)
    found = look(engine, A100)
    assert found.tuning is None
    assert found.odd
    assert A100 in found.told
    assert H200 in found.told
    assert "modelmill build" in found.told
    assert "\n" not in found.told


def test_an_engine_never_tuned_is_nothing_odd(engine: Path) -> None:
    found = look(engine, H200)
    assert (found.tuning, found.odd) == (None, False)
    assert "no tuning" in found.told


@pytest.mark.parametrize("content", [b"{", b"[]", to_bytes(StoredTuning(H200, {"linear": {"what": (1,)}}, {}))])
def test_a_damaged_file_means_defaults(engine: Path, content: bytes) -> None:
    store(engine, CHOICES)
    (engine / path_of(H200)).write_bytes(content)
    found = look(engine, H200)
    assert found.tuning is None
    assert found.odd
    assert "damaged" in found.told


def test_sizes_that_no_kernel_offers_are_left_out(engine: Path) -> None:
    wild = {"linear": {"1x4096->4096 bfloat16": (4, 1024, 4), "1x64->64 bfloat16": (64, 1 << 19, 32)}, "gone": {}}
    store(engine, wild)
    found = look(engine, H200)
    assert found.tuning is not None
    assert found.tuning.count == 1
    assert found.odd
    assert "1 that this version does not know" in found.told


def test_a_start_logs_one_line(engine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    store(engine, CHOICES)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: A100)
    with caplog.at_level(logging.INFO):
        assert tuning_for(engine, "cuda:0") is None
        assert tuning_for(engine, "cpu") is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
