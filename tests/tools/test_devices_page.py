"""docs/devices.md says what the code selects."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")
from modelmill.ops.cuda.common import build
from tools import devices_page
from tools.generated_page import stale_pages, write_pages
from tools.gpu_generations import GENERATIONS

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_code_gives() -> None:
    assert stale_pages(ROOT, devices_page.render()) == []


def test_the_page_follows_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pages(tmp_path, devices_page.render())
    assert stale_pages(tmp_path, devices_page.render()) == []
    monkeypatch.setattr(build, "unavailable_reason", lambda _device_type: "not today")
    assert stale_pages(tmp_path, devices_page.render()) == [devices_page.PAGE]


def test_each_generation_has_a_row_and_a_column() -> None:
    (text,) = devices_page.render().values()
    lines = text.splitlines()
    assert sum(line.startswith("| `sm_") for line in lines) == len(GENERATIONS)
    (head,) = (line for line in lines if line.startswith("| op |"))
    assert head == f"| op | {' | '.join(each.arch for each in GENERATIONS)} | AMD |"
