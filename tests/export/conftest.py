"""A real, tiny engine that the tests of exports share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stories import build_stories


@pytest.fixture(scope="session")
def stories(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained LLaMA of 260 thousand parameters, in float32."""
    return build_stories(shared, tmp_path_factory.mktemp("export"))
