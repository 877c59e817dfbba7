"""docs/devices.md says what the code selects."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("triton")
from modelmill.ops.cuda.common import build
from tools import devices_page
from tools.generated_page import stale_pages, write_pages
from tools.gpu_generations import GENERATIONS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def pages() -> Mapping[Path, str]:
    """What the code gives, computed once."""
    return devices_page.render()


def test_the_page_is_what_the_code_gives(pages: Mapping[Path, str]) -> None:
    assert stale_pages(ROOT, pages) == []


def test_the_page_follows_the_code(
    pages: Mapping[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pages(tmp_path, pages)
    assert stale_pages(tmp_path, devices_page.render()) == []
    monkeypatch.setattr(build, "unavailable_reason", lambda _device_type: "not today")
    assert stale_pages(tmp_path, devices_page.render()) == [devices_page.PAGE]


def test_each_generation_has_a_row_and_a_column(pages: Mapping[Path, str]) -> None:
    (text,) = pages.values()
    lines = text.splitlines()
    assert sum(line.startswith("| `sm_") for line in lines) == len(GENERATIONS)
    (head,) = (line for line in lines if line.startswith("| op |"))
    assert head == f"| op | {' | '.join(each.arch for each in GENERATIONS)} | AMD |"
