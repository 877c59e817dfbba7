"""Shared fixtures: the folder with real data beside the checkout, and a seeded torch."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from tests import optional_extras
from tests.full_only import is_full_only

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a GPU machine may have only pytest
    settings = None  # type: ignore[assignment, misc]

ROOT = Path(__file__).resolve().parent.parent

if settings is not None:
    # The same examples in every run, however slow the machine is; --hypothesis-profile=search draws
    # new ones.
    _PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("same", _PATIENT, derandomize=True)
    settings.register_profile("search", _PATIENT)
    settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--quick``: what ``make test`` runs."""
    parser.addoption(
        "--quick", action="store_true", help="leave out the tests of tests/full_only.py"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that only ``make test-all`` runs."""
    if not config.getoption("--quick"):
        return
    selected: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        (left_out if is_full_only(item.nodeid) else selected).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = selected


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    """Skip modules that import a missing extra."""
    return optional_extras.SkippingModule.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    """The same for imports in fixtures."""
    try:
        return (yield)
    except Exception as error:
        optional_extras.skip_or_raise(error)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """The same for imports in tests."""
    try:
        return (yield)
    except Exception as error:
        optional_extras.skip_or_raise(error)


def shared_dir() -> Path | None:
    """The folder of specs, real weights and data beside the checkout; None if it is missing."""
    path = ROOT.parent / "shared"
    return path if (path / "data").is_dir() else None


@pytest.fixture(scope="session")
def shared() -> Path:
    """Path of the shared data folder, or a skip that says why."""
    path = shared_dir()
    if path is None:
        pytest.skip("needs ../shared/data; where from: CONTRIBUTING.md, Test data")
    return path


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)
