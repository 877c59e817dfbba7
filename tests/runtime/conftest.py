"""Fixtures of the tests of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.wait import ended_if_hung

RANKS_SECONDS = 120  # no test of ranks takes as long; what does has hung


@pytest.fixture
def ended_ranks() -> Iterator[None]:
    """A hang is a failure, not a run that never ends."""
    with ended_if_hung(RANKS_SECONDS):
        yield


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny engines by family, built at first use."""
    from tests.runtime.rank_engines import tiny_engines

    return tiny_engines(tmp_path_factory)
