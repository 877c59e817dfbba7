"""A server whose ranks have whole experts: it answers, and says how many each has."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from modelmill.core.config import BuildConfig
from modelmill.llm import build_engine
from tests.models.all_families import CASES
from tests.serve.server_process import FLAGS, ServerProcess

EXPERTS = ("--tp", "2", "--enable-expert-parallel")


def test_whole_experts_of_each_rank_are_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    CASES["mixtral"].save(tmp_path / "hf")
    engine = tmp_path / "mixtral.engine"
    build_engine(
        tmp_path / "hf", engine, BuildConfig(dtype="float32", target="cpu"), check=False, tune=False
    )
    request = {"model": "mixtral", "prompt": [5, 6, 7], "temperature": 0, "max_tokens": 6}
    answers = []
    for flags in ((), EXPERTS):
        with ServerProcess(engine, template="", flags=(*FLAGS, *flags)) as server:
            status, body, _ = server.request("/v1/completions", request)
            assert status == 200, body
            answers.append((body["choices"], body["usage"]))
            server.process.send_signal(signal.SIGTERM)
            _, stderr = server.finish()
        assert ("; experts by rank: 3, 2" in stderr) == bool(flags)
    assert answers[0] == answers[1]
