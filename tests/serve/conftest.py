"""A real, tiny engine that all tests of the server share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from modelmill.cli.main import execute
from modelmill.core.config import BuildConfig
from modelmill.llm import LLM, build_engine
from tests.models.sam_seeded import small_file
from tests.optional_extras import skip_if_extra_missing
from tests.stories import build_stories

if TYPE_CHECKING:  # it wants the extra serve, and without it tests are skipped, not this file
    from tests.serve.service_thread import ServiceThread


@pytest.fixture(scope="session")
def stories(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained LLaMA of 260 thousand parameters, in float32."""
    return build_stories(shared, tmp_path_factory.mktemp("serve"))


@pytest.fixture(scope="session")
def sam(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small SAM with seeded weights."""
    folder = tmp_path_factory.mktemp("sam")
    build_engine(
        small_file(folder),
        folder / "sam.engine",
        BuildConfig(dtype="float32", target="cpu"),
        check=False,
    )
    return folder / "sam.engine"


@pytest.fixture(scope="session")
def running(stories: Path) -> Iterator[ServiceThread]:
    """Its service, with a worker process; called without a socket."""
    from tests.serve.service_thread import ServiceThread

    service = ServiceThread(stories)
    yield service
    service.close()


@pytest.fixture(scope="session")
def llm(stories: Path) -> LLM:
    """The same engine through the class for Python."""
    return LLM(stories, device="cpu", threads=1, chat_template="chatml", kv_cache_bytes=8 << 20)


@pytest.fixture
def cli(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Runs a command line in this process: (exit code, stdout, stderr)."""
    monkeypatch.setenv("CI", "1")

    def call(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = execute([str(word) for word in words])
        out = capsys.readouterr()
        skip_if_extra_missing(out.err)
        return code, out.out, out.err

    return call
