"""The logic of `make test-versions`: what is installed in a cell, which cells there are, what is kept, how it exits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.conftest import ROOT
from tools import version_matrix as matrix
from tools.version_matrix import Cell, Result


def test_the_ends_of_a_range() -> None:
    requirement = Requirement("x[b,a]>=1.2,<3")
    assert matrix.oldest(requirement) == "x[a,b]==1.2"
    assert matrix.unbounded(requirement) == "x[a,b]>=1.2"
    with pytest.raises(ValueError, match="no lower end"):
        matrix.oldest(Requirement("x<3"))


def test_each_set_names_each_package_once_with_torch_first() -> None:
    oldest, newest, core = (matrix.requirements(name) for name in ("oldest", "newest", "core"))
    names = [Requirement(line).name for line in newest]
    assert names == [Requirement(line).name for line in oldest]
    assert len(set(names)) == len(names)
    assert names[0] == "torch"
    assert {"triton", "transformers", "fastapi", "llguidance", "hypothesis", "matplotlib"} <= set(names)
    assert not {"ruff", "mypy"} & set(names)
    for low, whole in zip(oldest, newest, strict=True):
        (pin,) = Requirement(low).specifier
        assert pin.operator == "=="
        assert pin.version in Requirement(whole).specifier
    assert not {"triton", "transformers", "fastapi", "hypothesis"} & {Requirement(line).name for line in core}
    assert all("<" not in line for line in matrix.requirements("next"))


def test_every_package_of_a_plain_install_has_a_test_of_its_own() -> None:
    named = {word for library in matrix.TESTS for word in library.replace(",", " ").split()}
    core = {Requirement(line).name for line in matrix.requirements("core")} - {"pytest"}
    assert core <= named
    for files in matrix.TESTS.values():
        assert all((ROOT / file).is_file() for file in files)


def test_the_cells() -> None:
    names = [cell.name for cell in matrix.cells_of(("3.11", "3.12"))]
    assert names == ["3.11-oldest", "3.11-newest", "3.12-newest", "3.11-core", "3.12-next"]
    assert [cell.name for cell in matrix.cells_of(("3.13",))] == ["3.13-newest", "3.13-core", "3.13-next"]
    tested = (ROOT / "pyproject.toml").read_text().partition('requires-python = "')[2].partition('"')[0]
    assert all(python in SpecifierSet(tested) for python in matrix.PYTHONS)


def test_what_a_machine_can_have_replaces_a_line() -> None:
    assert matrix.pinned(["torch>=2.11,<3", "numpy==1"], ["torch==2.13.0"]) == ["torch==2.13.0", "numpy==1"]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Cells that ran; the oldest one and the next ones fail."""
    ran: list[str] = []

    def run(cell: Cell, sources: str, pins: Any) -> Result:
        ran.append(cell.name)
        if cell.set in ("oldest", "next"):
            return Result("failed", sources, 1.0, failures=["tests/x.py::test_y"])
        return Result("passed", sources, 1.0, passed=3, versions={"torch": "2.15.0"})

    monkeypatch.setattr(matrix, "OUT", tmp_path / "versions")
    monkeypatch.setattr(matrix, "digest", lambda: "abc")
    monkeypatch.setattr(matrix, "run", run)
    return ran


def test_what_passed_is_kept_and_what_failed_runs_again(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix.main(["--python", "3.11"]) == 1
    assert runs == ["3.11-oldest", "3.11-newest", "3.11-core", "3.11-next"]
    out = capsys.readouterr().out
    assert "| 3.11-newest | passed | 3 | 0 | 0 | 1 |" in out
    assert "3.11-oldest: tests/x.py::test_y" in out
    runs.clear()
    matrix.main(["--python", "3.11"])
    assert runs == ["3.11-oldest", "3.11-next"]
    assert "(kept)" in capsys.readouterr().out


def test_the_next_versions_do_not_bind(runs: list[str]) -> None:
    assert matrix.main(["--python", "3.11", "--set", "next", "newest"]) == 0
    assert matrix.main(["--python", "3.11", "--set", "oldest"]) == 1


def test_changed_sources_make_a_result_stale(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    matrix.main(["--python", "3.11", "--set", "newest"])
    monkeypatch.setattr(matrix, "digest", lambda: "def")
    matrix.main(["--python", "3.11", "--set", "newest"])
    assert runs == ["3.11-newest"] * 2
    assert json.loads((matrix.OUT / "3.11-newest.json").read_text())["sources"] == "def"


def test_a_python_that_is_absent_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(matrix, "OUT", tmp_path / "versions")
    monkeypatch.setattr(matrix, "find_python", lambda _: None)
    assert matrix.run(Cell("3.14", "newest"), "abc", ()).outcome == "no Python 3.14 here"
    assert matrix.main(["--python", "3.14", "--set", "newest"]) == 1  # nothing ran: nothing is green
