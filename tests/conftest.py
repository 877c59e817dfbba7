"""Shared fixtures: the folder with real data beside the checkout, engines and a service that are
made once for all folders, and a seeded torch.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from modelmill.core import env
from tests import optional_extras
from tests.full_only import is_exhaustive_only, is_full_only
from tests.hypothesis_examples import is_quick, set_quick

if TYPE_CHECKING:  # it needs the extra serve, without which tests are skipped and not this file
    from tests.serve.segment_service import SegmentService
    from tests.serve.service_thread import ServiceThread

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a GPU machine may have only pytest
    settings = None  # type: ignore[assignment, misc]

ROOT = Path(__file__).resolve().parent.parent

# What imports make stays: the collector of garbage would read all of it again and again.
gc.disable()

# OpenMP's threads spin at every barrier unless its variable is set before torch is imported, which
# costs several times the tests' own seconds where two halves of them share the cores.
with env.openmp_passive_during_imports():
    import torch

HAS_CUDA = torch.cuda.is_available()
# pytest attaches its handlers six times a test to each logger that does not propagate, and torch
# has dozens
for _name in list(logging.root.manager.loggerDict):
    if _name.startswith("torch"):
        logging.getLogger(_name).propagate = True

if settings is not None:
    # The same examples in every run, however slow the machine is; --hypothesis-profile=search draws
    # new ones.
    _PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("same", _PATIENT, derandomize=True)
    settings.register_profile("search", _PATIENT)
    settings.register_profile("quick", settings.get_profile("same"), max_examples=30)
    settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--quick``: what ``make test`` runs; ``--exhaustive``: what ``make test-families`` does."""
    parser.addoption(
        "--quick", action="store_true", help="leave out the tests of tests/full_only.py"
    )
    parser.addoption(
        "--exhaustive", action="store_true", help="with the tests of EXHAUSTIVE_ONLY, too"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Properties get fewer examples in ``make test``: a third, or what ``examples`` says."""
    set_quick(config.getoption("--quick"))
    if settings is not None and config.getoption("--quick"):
        settings.load_profile("quick")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that only ``make test-all`` or ``make test-families`` runs."""
    quick, exhaustive = config.getoption("--quick"), config.getoption("--exhaustive")
    selected: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        full_only = quick and is_full_only(item.nodeid)
        exhaustive_only = not exhaustive and is_exhaustive_only(item.nodeid)
        (left_out if full_only or exhaustive_only else selected).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = selected


class ImportedModules:
    """Spares the collector of garbage what was imported."""

    frozen = 0

    @classmethod
    def freeze(cls) -> None:
        """After collection, and after a test that imported a large package such as transformers."""
        if len(sys.modules) > cls.frozen + 100:
            gc.collect()
            gc.freeze()
            cls.frozen = len(sys.modules)


def pytest_collection_finish() -> None:
    ImportedModules.freeze()
    gc.set_threshold(5_000)  # 700 by default: a fortieth of the tests' seconds
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    ImportedModules.freeze()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    """Skip modules that import a missing extra."""
    return optional_extras.SkippingModule.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    """The same for imports in fixtures and in tests."""
    try:
        return (yield)
    except Exception as error:
        optional_extras.skip_or_raise(error)


pytest_pyfunc_call = pytest_runtest_setup


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


@pytest.fixture(scope="session")
def stories(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engine of a trained LLaMA of 260 thousand parameters, in float32 and accepted; read only."""
    from tests.stories import build_stories

    return build_stories(shared, tmp_path_factory.mktemp("stories"))


@pytest.fixture(scope="session")
def sam(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engine of a small SAM with seeded weights; read only."""
    from modelmill.core.config import BuildConfig
    from modelmill.llm import build_engine
    from tests.models.sam_seeded import small_file

    folder = tmp_path_factory.mktemp("sam")
    config = BuildConfig(dtype="float32", target="cpu")
    build_engine(small_file(folder), folder / "sam.engine", config, check=False)
    return folder / "sam.engine"


@pytest.fixture(scope="session")
def running(stories: Path) -> Iterator[ServiceThread]:
    """The service of ``stories``, with a worker process; called without a socket."""
    from tests.serve.service_thread import ServiceThread

    service = ServiceThread(stories)
    yield service
    service.close()


@pytest.fixture(scope="session")
def running_with_sam(stories: Path, sam: Path) -> Iterator[SegmentService]:
    """As ``running``, with a second worker for ``sam``."""
    from tests.serve.segment_service import SegmentService

    service = SegmentService(stories, sam)
    yield service
    service.close()


@pytest.fixture(autouse=True, scope="session")
def _no_fsync() -> Iterator[None]:
    """Files of tests need not survive a power cut: an engine's build would wait for ten of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _short_acceptance() -> Iterator[None]:
    """In ``make test`` engines are judged on sequences of half the length."""
    with pytest.MonkeyPatch.context() as patch:
        if is_quick():
            patch.setattr("modelmill.accept.run.SEQUENCE_LENGTH", 48)
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    if HAS_CUDA:
        torch.manual_seed(0)
    else:  # torch.manual_seed would keep a seed for a later CUDA, with a formatted stack
        torch.default_generator.manual_seed(0)
