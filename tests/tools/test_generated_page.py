"""Tools that write a page: the repository's is fresh, and a changed one is stale."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tools import families_page, request_fields_page
from tools.generated_page import stale_pages

ROOT = Path(__file__).resolve().parents[2]
TOOLS = [(families_page, "families"), (request_fields_page, "request-fields")]


@pytest.mark.parametrize(("tool", "target"), TOOLS)
def test_the_page_of_the_repository_is_fresh(tool: ModuleType, target: str) -> None:
    assert not stale_pages(ROOT, tool.render()), f"run `make {target}` and commit what it writes"


@pytest.mark.parametrize(("tool", "target"), TOOLS)
def test_a_changed_page_is_stale(
    tool: ModuleType, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main(["--root", str(tmp_path)]) == 0
    assert tool.main(["--root", str(tmp_path), "--check"]) == 0
    (tmp_path / tool.PAGE).write_text("changed")
    assert tool.main(["--root", str(tmp_path), "--check"]) == 1
    assert f"{tool.PAGE} is stale; run `make {target}`" in capsys.readouterr().err
