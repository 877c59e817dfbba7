"""A real, tiny engine that the tests of exports share."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelmill.core.config import BuildConfig
from modelmill.llm import build_engine


@pytest.fixture(scope="session")
def stories(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained LLaMA of 260 thousand parameters, in float32."""
    out = tmp_path_factory.mktemp("export") / "stories.engine"
    build_engine(
        shared / "data/models/stories260K", out, BuildConfig(dtype="float32", target="cpu")
    )
    return out
