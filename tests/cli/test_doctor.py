"""What ``modelmill doctor --report`` prints for an issue."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelmill.cli.main import execute


def test_the_report_for_an_issue_has_the_versions_and_no_path(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert execute(["doctor", "--report"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("* ") for line in lines)
    assert lines[0].startswith("* modelmill ")
    assert "Python" in lines[0]
    text = "\n".join(lines)
    assert "torch" in text
    assert "rms_norm" in text
    assert str(Path.home()) not in text
    assert "/usr/" not in text
