"""The command line of tools that write a page: a changed page is stale, and a fresh one is not."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tools import families_page, request_fields_page


@pytest.mark.parametrize(
    ("tool", "target"), [(families_page, "families"), (request_fields_page, "request-fields")]
)
def test_a_changed_page_is_stale(
    tool: ModuleType, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main(["--root", str(tmp_path)]) == 0
    assert tool.main(["--root", str(tmp_path), "--check"]) == 0
    (tmp_path / tool.PAGE).write_text("changed")
    assert tool.main(["--root", str(tmp_path), "--check"]) == 1
    assert f"{tool.PAGE} is stale; run `make {target}`" in capsys.readouterr().err
