"""What tests of one family share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.all_families import CASES
from tests.models.planted_fault import FaultlessEngines


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded checkpoint of the module's ``FAMILY``, its config changed by ``CHANGES``."""
    family: str = request.module.FAMILY
    folder = tmp_path_factory.mktemp(family)
    CASES[family].save(folder, **getattr(request.module, "CHANGES", {}))
    return folder


@pytest.fixture(scope="module")
def faultless(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> FaultlessEngines:
    """The engines of ``checkpoint`` without a fault."""
    return FaultlessEngines(checkpoint, tmp_path_factory.mktemp("faultless"))
