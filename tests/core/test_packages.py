"""Installed versions against the ranges that the package's own metadata gives."""

from __future__ import annotations

import re
import tomllib
from email.message import Message
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from modelmill.core import packages
from modelmill.core.errors import MissingDependency
from modelmill.core.packages import UntestedVersion, require_package, untested_versions
from tests.conftest import ROOT


def _pretend(
    monkeypatch: pytest.MonkeyPatch, requires: list[str], versions: dict[str, str], python: str = ""
) -> None:
    package_metadata = Message()
    package_metadata["Requires-Python"] = python

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "metadata", lambda _: package_metadata)
    monkeypatch.setattr(metadata, "requires", lambda _: requires)
    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("2.11.0", True),
        ("2.15.3+cpu", True),
        ("2.15.0.dev20260101", True),
        ("2.10.9", False),
        ("2.16.0", False),
        ("2.16.0+cu130", False),
        ("unknown", False),
    ],
)
def test_a_version_is_inside_or_outside(
    monkeypatch: pytest.MonkeyPatch, version: str, tested: bool
) -> None:
    _pretend(monkeypatch, ["torch<2.16,>=2.11"], {"torch": version})
    assert untested_versions() == (
        [] if tested else [UntestedVersion("torch", version, ">=2.11,<2.16")]
    )


def test_extras_and_python_are_examined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    requires = [
        'gguf<1,>=0.17; extra == "test"',
        'gguf<1,>=0.17; extra == "conformance"',
        'ray<3; extra == "ray"',
        "?",
    ]
    _pretend(monkeypatch, requires, {"gguf": "1.0"}, python="<3,>=2")
    monkeypatch.setattr(packages.platform, "python_version", lambda: "3.11.7")
    assert untested_versions() == [
        UntestedVersion("Python", "3.11.7", ">=2,<3"),
        UntestedVersion("gguf", "1.0", ">=0.17,<1"),
    ]


def test_a_source_tree_alone_has_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "metadata", absent)
    assert untested_versions() == []


def test_what_is_needed_is_said_with_the_way_out() -> None:
    require_package("--plot", "json", "report")
    with pytest.raises(
        MissingDependency, match=r"--plot needs no-such-package; .* -e '.*\[report\]'"
    ):
        require_package("--plot", "no_such_package", "report")


def _requirements() -> list[str]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    return [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]


def test_every_range_has_two_ends_and_is_the_same_wherever_it_stands() -> None:
    """A range without an upper end admits untested versions."""
    ranges: dict[str, str] = {}
    for line in _requirements():
        name = line.partition(">")[0].partition("[")[0]
        if not name.startswith("types-"):
            assert ">=" in line, line
            assert "<" in line, line
        assert ranges.setdefault(name, line) == line, f"{line} is {ranges[name]} elsewhere"


def test_pinned_versions_lie_inside_the_ranges() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    pinned = {canonicalize_name(name): version for name, version in pinned.items()}
    for line in _requirements():
        requirement = Requirement(line)
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is None or requirement.specifier.contains(version), (
            f"{line}, constraints.txt has {version}"
        )


def test_extras_of_a_checkout_are_installed_from_its_folder() -> None:
    assert packages.install_command("serve", "ray") == f"pip install -e '{ROOT}[serve,ray]'"


def test_extras_of_a_wheel_are_named_package_by_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(packages, "ROOT", tmp_path)  # as site-packages: no pyproject.toml
    requires = [
        "torch<2.16,>=2.11",
        'fastapi<0.166,>=0.120; extra == "serve"',
        'uvicorn<0.55,>=0.35; extra == "serve"',
        'ray[serve]<2.61,>=2.60; extra == "ray"',
        'gguf<1; extra == "test"',
    ]
    _pretend(monkeypatch, requires, {})
    assert packages.install_command("serve", "ray") == (
        "pip install 'fastapi>=0.120,<0.166' 'uvicorn>=0.35,<0.55' 'ray[serve]>=2.60,<2.61'"
    )


def test_every_extra_of_the_project_has_a_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requires = [f"{line}; extra == {extra!r}" for extra in extras for line in extras[extra]]
    _pretend(monkeypatch, requires, {})
    monkeypatch.setattr(packages, "ROOT", tmp_path)
    for extra, lines in extras.items():
        command = packages.install_command(extra)
        assert command.count("'") == 2 * len(lines), extra


FROM_AN_INDEX = re.compile(r"pip install[^\n`&]*?[\s'\"]modelmill(?![\w./-])")
HINTS = (
    "modelmill", "docs", "examples", "tools", "tests", "docker", "deploy", "README.md", "Makefile",
)  # fmt: skip


@pytest.mark.parametrize("place", HINTS)
def test_no_hint_takes_modelmill_from_an_index(place: str) -> None:
    """None has it; a hint must work from a clone or a wheel."""
    root = ROOT / place
    files = [root] if root.is_file() else [path for path in root.rglob("*") if path.is_file()]
    texts = {
        path: path.read_text()
        for path in files
        if path.suffix in (".py", ".md", ".Dockerfile", ".yml", ".yaml", "")
        and "__pycache__" not in path.parts
        and path != Path(__file__)
    }
    assert texts
    hits = {str(path): FROM_AN_INDEX.findall(text) for path, text in texts.items()}
    assert {path: names for path, names in hits.items() if names} == {}


def test_a_hint_that_takes_it_from_an_index_is_seen() -> None:
    for hint in ("'modelmill[serve]'", "modelmill", "-U modelmill[gpu]"):
        assert FROM_AN_INDEX.search(f"`pip install {hint}`"), hint
    for hint in ("-e '.[serve]'", "modelmill-0.1.0.whl", ". && modelmill serve", "./modelmill"):
        assert not FROM_AN_INDEX.search(f"pip install {hint}"), hint
