"""Tiny seeded checkpoints that the tests of acceptance share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accept.build_and_accept import TinyCheckpoints


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of checkpoints by family; each is written when a test first reads it."""
    return TinyCheckpoints(tmp_path_factory.mktemp("tiny"))
