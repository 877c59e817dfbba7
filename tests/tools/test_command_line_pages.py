"""docs/cli is what the help pages of the commands give."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelmill.cli.main import list_subcommands
from tools import command_line_pages
from tools.generated_page import stale_pages

ROOT = Path(__file__).resolve().parents[2]


def test_the_pages_of_the_repository_are_fresh() -> None:
    assert not stale_pages(ROOT, command_line_pages.render(), command_line_pages.FOLDER), (
        "run `make command-line` and commit what it writes"
    )


def test_every_command_has_a_page_that_the_index_links_to() -> None:
    index = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    for verb in list_subcommands():
        page = f"cli/{verb.replace('_', '-')}.md"
        assert (ROOT / "docs" / page).exists()
        assert f"({page})" in index


def test_a_changed_page_and_one_of_no_command_are_stale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line_pages.main(["--root", str(tmp_path)]) == 0
    (tmp_path / "docs/cli/run.md").write_text("changed")
    (tmp_path / "docs/cli/walk.md").write_text("no such command")
    assert command_line_pages.main(["--root", str(tmp_path), "--check"]) == 1
    error = capsys.readouterr().err
    assert "docs/cli/run.md is stale; run `make command-line`" in error
    assert "docs/cli/walk.md is stale" in error
    assert command_line_pages.main(["--root", str(tmp_path)]) == 0
    assert not (tmp_path / "docs/cli/walk.md").exists()
    assert command_line_pages.main(["--root", str(tmp_path), "--check"]) == 0
