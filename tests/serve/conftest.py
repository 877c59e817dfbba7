"""The engine of the tests of the server through the class for Python, and a command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from modelmill.cli.main import run_command_line
from modelmill.llm import LLM
from tests.optional_extras import skip_if_extra_missing
from tests.serve.server_process import ServerProcess


@pytest.fixture(scope="session")
def llm(stories: Path) -> LLM:
    """The engine ``stories`` through the class for Python."""
    return LLM(stories, device="cpu", threads=1, chat_template="chatml", kv_cache_bytes=8 << 20)


@pytest.fixture(scope="session")
def server(stories: Path) -> Iterator[ServerProcess]:
    """``modelmill serve`` of the engine ``stories``, in a process of its own."""
    with ServerProcess(stories) as serving:
        yield serving


@pytest.fixture
def brief_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools without an introduction: the engine reads 512 tokens, nearly every letter is one."""
    monkeypatch.setattr("modelmill.text.tool_prompts.TOOLS_SYSTEM_PROMPT", "{tools}")


@pytest.fixture
def cli(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Runs a command line in this process: (exit code, stdout, stderr)."""
    monkeypatch.setenv("CI", "1")

    def call(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run_command_line([str(word) for word in words])
        out = capsys.readouterr()
        skip_if_extra_missing(out.err)
        return code, out.out, out.err

    return call
