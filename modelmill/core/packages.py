"""Checks that required packages are installed, and in a version that was tested.

The tested ranges are in pyproject.toml only; an installed modelmill has them in its metadata.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from modelmill.core.errors import MissingDependency

PACKAGE_NAME = "modelmill"
ROOT = Path(__file__).resolve().parents[2]  # of a checkout, or where packages are installed
INTERPRETER_NAME = "Python"


@dataclass(frozen=True)
class UntestedVersion:
    """An installed version outside the tested range.

    Attributes:
        tested: the range, as ``>=2.11,<2.16``.
    """

    name: str
    version: str
    tested: str


def require_package(feature: str, module: str, extra: str) -> None:
    """Check that ``module`` is installed; call this before any computation.

    Args:
        feature: what needs it, as the user named it (``--plot``).
        module: the top-level module.
        extra: the extra of modelmill that installs it.

    Raises:
        MissingDependency: if the module is not installed.
    """
    if find_spec(module) is None:
        package = module.replace("_", "-")
        raise MissingDependency(
            f"{feature} needs {package}; install it with: {install_command(extra)}"
        )


def install_command(*extras: str) -> str:
    """Return the command that installs extras of this modelmill, which no package index has.

    In a checkout it installs the checkout; elsewhere it names the packages, as the installed
    metadata does.
    """
    if (ROOT / "pyproject.toml").is_file():
        return f"pip install -e '{ROOT}[{','.join(extras)}]'"
    named = dict.fromkeys(line for extra in extras for line in _iter_extra_packages(extra))
    return " ".join(["pip install", *(f"'{line}'" for line in named)])


def _iter_extra_packages(extra: str) -> Iterator[str]:
    """Yield the packages of an extra with their tested ranges, as pip takes them."""
    from packaging.requirements import Requirement

    for line in metadata.requires(PACKAGE_NAME) or []:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is not None and marker.evaluate({"extra": extra}):
            parts = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
            yield f"{requirement.name}{parts}{sort_version_range(str(requirement.specifier))}"


def untested_versions() -> list[UntestedVersion]:
    """Return the packages, and Python, whose version is outside the tested range.

    Empty if modelmill's metadata is not installed.
    """
    untested: dict[str, UntestedVersion] = {}
    for name, version, tested in _installed_versions():
        if not _is_in_tested_range(version, tested):
            untested[name] = UntestedVersion(name, version, sort_version_range(tested))
    return list(untested.values())


def sort_version_range(tested: str) -> str:
    """Sort a range to ``>=1,<2``: build tools write its parts in any order."""
    return ",".join(
        sorted(
            tested.replace(" ", "").split(","), key=lambda part: (not part.startswith(">"), part)
        )
    )


def _installed_versions() -> Iterator[tuple[str, str, str]]:
    """Yield (name, version, tested range) of Python and of every installed dependency."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        ours = metadata.metadata(PACKAGE_NAME)
    except metadata.PackageNotFoundError:
        return
    python = ours["Requires-Python"] if "Requires-Python" in ours else ""  # noqa: SIM401  its type has no get
    yield INTERPRETER_NAME, platform.python_version(), python
    for line in metadata.requires(PACKAGE_NAME) or []:
        try:
            requirement = Requirement(line)
            version = metadata.version(requirement.name)
        except (InvalidRequirement, metadata.PackageNotFoundError):
            continue
        yield requirement.name, version, str(requirement.specifier)


def _is_in_tested_range(version: str, tested: str) -> bool:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return SpecifierSet(tested).contains(version, prereleases=True)
    except InvalidSpecifier:
        return True
    except InvalidVersion:  # a build from source may have any version string
        return False
