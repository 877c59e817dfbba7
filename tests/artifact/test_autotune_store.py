"""The tuning file: what was written is read, and nothing in it can keep an engine from running."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelmill.artifact.autotune_store import (
    AutotuneRecord,
    autotune_record_path,
    device_slug,
    encode_autotune_record,
    read_autotune_record,
    tuned_devices,
)

H200 = "NVIDIA H200"
STORED = AutotuneRecord(
    H200, {"linear": {"1x4096->4096 bfloat16": (4, 1024, 4)}}, {"date": "today"}
)


def write(engine: Path, content: bytes, device: str = H200) -> Path:
    path = engine / autotune_record_path(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return engine


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert read_autotune_record(write(tmp_path, encode_autotune_record(STORED)), H200) == STORED
    assert tuned_devices(tmp_path) == [H200]


def test_another_device_finds_nothing(tmp_path: Path) -> None:
    write(tmp_path, encode_autotune_record(STORED))
    assert read_autotune_record(tmp_path, "NVIDIA A100-SXM4-80GB") is None
    assert read_autotune_record(tmp_path / "no engine", H200) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [(H200, "nvidia-h200"), ("../../etc", "etc"), ("", "unnamed"), ("G" * 300, "g" * 80)],
)
def test_a_name_is_a_plain_file_name(name: str, expected: str) -> None:
    assert device_slug(name) == expected


CASES = {
    "empty": b"",
    "no JSON": b"{",
    "deep": b"[" * 100_000,
    "not text": b"\xff\xfe\x00",
    "a list": b"[]",
    "another schema": json.dumps({"schema": 99}).encode(),
    "another device": encode_autotune_record(AutotuneRecord("NVIDIA A100", {}, {})),
    "no choices": json.dumps({"schema": 1, "device": H200, "facts": {}}).encode(),
    "sizes of text": encode_autotune_record(AutotuneRecord(H200, {"linear": {"k": ("4",)}}, {})),  # type: ignore[dict-item]
    "sizes below one": encode_autotune_record(AutotuneRecord(H200, {"linear": {"k": (0,)}}, {})),
    "sizes beyond all": encode_autotune_record(
        AutotuneRecord(H200, {"linear": {"k": (1 << 40,)}}, {})
    ),
    "too large": b" " * (1 << 21),
}


@pytest.mark.parametrize("content", CASES.values(), ids=CASES.keys())
def test_a_damaged_file_is_reported(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ValueError) as error:
        read_autotune_record(write(tmp_path, content), H200)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 60
