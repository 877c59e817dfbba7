"""What a wheel and a source distribution carry, compared with the files that are there."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
# what Python writes beside its sources, and what is made when a wheel is built
MADE = re.compile(r"(^|/)__pycache__/|\.py[cod]$|\.so$|(^|/)\.[a-z]+_cache/|\.egg-info/")


def files(folder: Path) -> list[Path]:
    return [
        p
        for p in sorted(folder.rglob("*"))
        if p.is_file() and not MADE.search(p.relative_to(ROOT).as_posix())
    ]


def test_every_file_of_the_package_is_in_the_wheel() -> None:
    """Native sources, templates, pages and word lists: a file that no pattern names would be left
    out in silence.
    """
    patterns: dict[str, list[str]] = SETTINGS["tool"]["setuptools"]["package-data"]
    carried = {
        path
        for package, globs in patterns.items()
        for glob in globs
        for path in (ROOT / package.replace(".", "/")).glob(glob)
    }
    data_files = {path for path in files(ROOT / "modelmill") if path.suffix != ".py"}
    assert data_files, "there are such files"
    assert data_files - carried == set()
    assert all(
        any(ROOT.joinpath(p.replace(".", "/")).glob(g))
        for p, globs in patterns.items()
        for g in globs
    )


def test_every_folder_with_code_is_a_package() -> None:
    """setuptools finds packages by their __init__.py."""
    folders = {path.parent for path in files(ROOT / "modelmill") if path.suffix == ".py"}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize(
    "folder", ["benchmarks", "docs", "examples", "modelmill", "tests", "tools"]
)
def test_the_source_distribution_takes_whole_folders(folder: str) -> None:
    assert f"graft {folder}" in (ROOT / "MANIFEST.in").read_text().splitlines()


def test_the_source_distribution_takes_the_files_at_the_root() -> None:
    words = (ROOT / "MANIFEST.in").read_text().split()
    there = {
        p.name
        for p in ROOT.iterdir()
        if p.is_file() and p.suffix in ("", ".md", ".txt", ".toml", ".py", ".json", ".yml")
    }
    hidden = {".clang-format", ".dockerignore", ".gitignore", ".pre-commit-config.yaml"}
    assert hidden <= {p.name for p in ROOT.iterdir()}, "what linters and builds read"
    visible = {name for name in there if not name.startswith(".")}
    assert hidden | visible - {"PKG-INFO"} <= set(words)


def test_the_licence_is_an_expression_and_a_file() -> None:
    project = SETTINGS["project"]
    licences = set(project["license"].split(" AND "))
    assert "Apache-2.0" in licences
    vendored = (ROOT / "modelmill/serve/page/vendor/LICENSES.txt").read_text(encoding="utf-8")
    assert {each for each in ("MIT", "BSD-2-Clause", "BSD-3-Clause") if each in vendored} < licences
    assert ("OFL-1.1" in licences) == ("SIL Open Font License" in vendored)
    assert "modelmill/serve/page/vendor/LICENSES.txt" in project["license-files"]
    assert all((ROOT / name).is_file() for name in project["license-files"])
    (needed,) = SETTINGS["build-system"]["requires"]
    assert int(re.fullmatch(r"setuptools>=(\d+)", needed)[1]) >= 77  # type: ignore[index]  # which reads expressions


def test_what_builds_the_wheel_needs_nothing_that_is_not_installed() -> None:
    """setup.py and the file that it loads run before torch is there."""
    for path in (ROOT / "setup.py", ROOT / "modelmill/ops/cpu/common/prebuilt.py"):
        imported = {
            (node.module or "").split(".")[0]
            if isinstance(node, ast.ImportFrom)
            else node.names[0].name.split(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, (ast.Import, ast.ImportFrom))
        }
        assert not imported & {"modelmill", "torch", "numpy"}, path


def test_what_the_build_reads_of_the_package_is_there() -> None:
    """setup.py imports one module by its path and nothing checks its types: a rename there stops
    every installation.
    """
    setup = ast.parse((ROOT / "setup.py").read_text())
    module = ROOT / "modelmill/ops/cpu/common/prebuilt.py"
    called = {
        node.attr
        for node in ast.walk(setup)
        if isinstance(node, ast.Attribute)
        and (
            (isinstance(node.value, ast.Name) and node.value.id == "prebuilt")
            or (isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "_prebuilt")
        )
    }
    assert called, "setup.py asks that module something"
    assert called <= names_defined(ast.parse(module.read_text()))


def names_defined(tree: ast.Module) -> set[str]:
    """Functions, classes and constants at the top of a module."""
    functions = {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    targets = [t for node in tree.body if isinstance(node, ast.Assign) for t in node.targets]
    targets += [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
    return functions | {t.id for t in targets if isinstance(t, ast.Name)}
