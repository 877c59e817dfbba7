"""A real, tiny engine that all tests of the server share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from modelmill.core.config import BuildConfig
from modelmill.llm import LLM, build_engine
from tests.serve.running import Running


@pytest.fixture(scope="session")
def stories(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained LLaMA of 260 thousand parameters, in float32."""
    out = tmp_path_factory.mktemp("serve") / "stories.engine"
    build_engine(shared / "data/models/stories260K", out, BuildConfig(dtype="float32", target="cpu"))
    return out


@pytest.fixture(scope="session")
def running(stories: Path) -> Iterator[Running]:
    """Its service, with a worker process; called without a socket."""
    service = Running(stories)
    yield service
    service.close()


@pytest.fixture(scope="session")
def llm(stories: Path) -> LLM:
    """The same engine through the class for Python."""
    return LLM(stories, device="cpu", threads=1, chat_template="chatml", kv_cache_bytes=8 << 20)
