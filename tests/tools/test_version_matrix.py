"""The logic of `make test-versions`: what is installed in a cell, which cells there are, what is
kept, how it exits.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.conftest import ROOT
from tools import version_matrix as matrix
from tools.version_matrix import CellResult, MatrixCell


def test_the_ends_of_a_range() -> None:
    requirement = Requirement("x[b,a]>=1.2,<3")
    assert matrix.oldest(requirement) == "x[a,b]==1.2"
    assert matrix.without_upper_bound(requirement) == "x[a,b]>=1.2"
    with pytest.raises(ValueError, match="no lower end"):
        matrix.oldest(Requirement("x<3"))


def test_each_set_names_each_package_once_with_torch_first() -> None:
    oldest, newest, core = (matrix.requirements(name) for name in ("oldest", "newest", "core"))
    names = [Requirement(line).name for line in newest]
    assert names == [Requirement(line).name for line in oldest]
    assert len(set(names)) == len(names)
    assert names[0] == "torch"
    assert {"triton", "transformers", "fastapi", "llguidance", "hypothesis", "matplotlib"} <= set(
        names
    )
    assert not {"ruff", "mypy"} & set(names)
    for low, requirement in zip(oldest, newest, strict=True):
        (pin,) = Requirement(low).specifier
        assert pin.operator == "=="
        assert pin.version in Requirement(requirement).specifier
    assert not {"triton", "transformers", "fastapi", "hypothesis"} & {
        Requirement(line).name for line in core
    }
    assert all("<" not in line for line in matrix.requirements("next"))


def test_every_package_of_a_plain_install_has_a_test_of_its_own() -> None:
    named = {word for library in matrix.TESTS for word in library.replace(",", " ").split()}
    core = {Requirement(line).name for line in matrix.requirements("core")} - {"pytest"}
    assert core <= named
    for files in matrix.TESTS.values():
        assert all((ROOT / file).is_file() for file in files)


def test_the_cells() -> None:
    names = [cell.name for cell in matrix.make_cells(("3.11", "3.12"))]
    assert names == ["3.11-oldest", "3.11-newest", "3.12-newest", "3.11-core", "3.12-next"]
    assert [cell.name for cell in matrix.make_cells(("3.13",))] == [
        "3.13-newest",
        "3.13-core",
        "3.13-next",
    ]
    tested = (
        (ROOT / "pyproject.toml").read_text().partition('requires-python = "')[2].partition('"')[0]
    )
    assert all(python in SpecifierSet(tested) for python in matrix.PYTHONS)


def test_what_a_machine_can_have_replaces_a_line() -> None:
    assert matrix.apply_pins(["torch>=2.11,<3", "numpy==1"], ["torch==2.13.0"]) == [
        "torch==2.13.0",
        "numpy==1",
    ]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Cells that ran; the oldest one and the next ones fail."""
    ran: list[str] = []

    def run(cell: MatrixCell, sources: str, pins: Any, keep: bool) -> CellResult:
        ran.append(cell.name)
        if cell.version_set in ("oldest", "next"):
            return CellResult("failed", sources, 1.0, failures=["tests/x.py::test_y"])
        return CellResult("passed", sources, 1.0, passed=3, versions={"torch": "2.15.0"})

    monkeypatch.setattr(matrix, "OUT", tmp_path / "versions")
    monkeypatch.setattr(matrix, "digest", lambda: "abc")
    monkeypatch.setattr(matrix, "run", run)
    return ran


def test_what_passed_is_kept_and_what_failed_runs_again(
    runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert matrix.main(["--python", "3.11"]) == 1
    assert runs == ["3.11-oldest", "3.11-newest", "3.11-core", "3.11-next"]
    out = capsys.readouterr().out
    today = time.strftime("%Y-%m-%d", time.gmtime())
    assert re.search(
        rf"^\| 3.11-newest \| passed \| 3 \| 0 \| 0 \| 1 \| \w* \| {today} \|$",
        out,
        flags=re.MULTILINE,
    )
    assert "3.11-oldest: tests/x.py::test_y" in out
    runs.clear()
    matrix.main(["--python", "3.11"])
    assert runs == ["3.11-oldest", "3.11-next"]
    assert "(kept)" in capsys.readouterr().out


def test_the_next_versions_do_not_bind(runs: list[str]) -> None:
    assert matrix.main(["--python", "3.11", "--set", "next", "newest"]) == 0
    assert matrix.main(["--python", "3.11", "--set", "oldest"]) == 1


def test_changed_sources_make_a_result_stale(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix.main(["--python", "3.11", "--set", "newest"])
    monkeypatch.setattr(matrix, "digest", lambda: "def")
    matrix.main(["--python", "3.11", "--set", "newest"])
    assert runs == ["3.11-newest"] * 2
    assert json.loads((matrix.OUT / "3.11-newest.json").read_text())["sources"] == "def"


def test_a_python_that_is_absent_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(matrix, "OUT", tmp_path / "versions")
    monkeypatch.setattr(matrix, "find_python", lambda _: None)
    assert matrix.run(MatrixCell("3.14", "newest"), "abc", ()).outcome == "no Python 3.14 here"
    # nothing ran: nothing is green
    assert matrix.main(["--python", "3.14", "--set", "newest"]) == 1


def test_each_cell_has_a_log_and_every_failure_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A log's name was "3.log" for each cell, and the name of a case ended at its first space."""
    output = (
        "FAILED tests/a.py::test_b[two words-1] - assert 1 == 2\nERROR tests/a.py::test_c[x - y]\n"
    )
    output += "1 failed, 7 passed, 1 error in 2 s"

    def pytest_says(command: Any, stdout: Any, **rest: Any) -> Any:
        stdout.write(output)
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(matrix.subprocess, "run", pytest_says)
    for cell in ("3.11-oldest", "3.11-newest"):
        result = matrix.run_tests(Path("python"), tmp_path / cell, "abc")
        assert (tmp_path / f"{cell}.log").read_text() == output
    assert result.failures == ["tests/a.py::test_b[two words-1]", "tests/a.py::test_c[x - y]"]
    assert (result.outcome, result.passed, result.failed) == ("failed", 7, 2)


def test_an_environment_that_was_installed_to_its_end_serves_again(tmp_path: Path) -> None:
    assert not matrix.ready(tmp_path, ["a==1", "b==2"])
    (tmp_path / matrix.READY).write_text("a==1\nb==2")
    assert matrix.ready(tmp_path, ["a==1", "b==2"])
    assert not matrix.ready(tmp_path, ["a==1", "b==3"])


def test_the_page_names_ranges_versions_and_failures(runs: list[str], tmp_path: Path) -> None:
    assert matrix.main(["--python", "3.11", "--write", str(tmp_path / "page.md")]) == 1
    page = (tmp_path / "page.md").read_text()
    assert "| package | range | 3.11-newest | 3.11-core |" in page
    assert f"| torch | {matrix.tested_ranges()['torch']} | 2.15.0 | 2.15.0 |" in page
    assert "3.11-oldest: tests/x.py::test_y" in page


def test_many_failures_are_counted() -> None:
    text = matrix.table(
        {
            MatrixCell("3.11", "oldest"): CellResult(
                "failed", "abc", 1.0, failures=[f"t{n}" for n in range(25)]
            )
        }
    )
    assert "3.11-oldest: t19" in text
    assert "t20" not in text
    assert "and 5 more, in versions/3.11-oldest.log" in text


@pytest.mark.parametrize(("newer", "ran"), [("2.15.0", []), ("2.16.0", ["3.14-next"])])
def test_next_runs_only_where_something_is_newer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, newer: str, ran: list[str]
) -> None:
    tested: list[str] = []

    def run(python: Path, folder: Path, sources: str) -> CellResult:
        tested.append(folder.name)
        return CellResult("failed", sources, failures=["tests/x.py::test_y"])

    newest = CellResult("passed", "abc", 1.0, passed=3, versions={"torch": "2.15.0"})
    monkeypatch.setattr(matrix, "OUT", tmp_path)
    (tmp_path / "3.14-newest.json").write_text(json.dumps(asdict(newest)))
    (tmp_path / "3.14-next").mkdir()
    monkeypatch.setattr(matrix, "find_python", lambda _: "python")
    monkeypatch.setattr(matrix, "install", lambda *_: None)
    monkeypatch.setattr(matrix, "versions_of", lambda *_: {"torch": newer})
    monkeypatch.setattr(matrix, "run_tests", run)
    result = matrix.run(MatrixCell("3.14", "next"), "abc", ())
    assert tested == ran
    assert (result.outcome, result.versions) == ("failed" if ran else "passed", {"torch": newer})


def test_ranges_end_where_the_page_of_tested_versions_ends() -> None:
    """Each range begins at the oldest version of its row and admits no minor version after the
    newest one. Columns of ``next`` may hold versions after the range's end.
    """
    lines = (ROOT / "docs" / "versions.md").read_text().splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("| package |"))
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines[start:]
        if line.startswith("|")
    ]
    assert {
        "torch",
        "triton",
        "transformers",
        "tokenizers",
        "pydantic",
        "fastapi",
        "llguidance",
    } <= {r[0] for r in rows}
    ranges = matrix.tested_ranges()
    binding = [place for place, cell in enumerate(rows[0]) if not cell.endswith("-next")]
    for row in rows[2:]:
        name, tested, *installed = (row[place] for place in binding)
        assert tested == ranges[name], f"run the matrix again: {name}"
        specifier, versions = (
            SpecifierSet(tested),
            sorted(Version(each) for each in installed if each != "–"),
        )
        (low,) = (Version(part.version) for part in specifier if part.operator == ">=")
        assert versions[0].release[: len(low.release)] == low.release, name
        assert all(version in specifier for version in versions), name
        newest = versions[-1].release
        assert f"{newest[0]}.{newest[1] + 1}" not in specifier, (
            f"no test ran with the end of {name}'s range"
        )


def test_a_machine_without_git_loses_no_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert matrix.with_date(CellResult("passed", "abc")).commit == ""
