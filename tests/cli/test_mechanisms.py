"""Each mechanism as a user meets it: build, run, chat, compare and serve."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.mechanisms import MECHANISMS, save_checkpoint
from tests.serve.server_process import ServerProcess

Cli = Callable[..., tuple[int, Any, str]]
ASK = [{"role": "user", "content": "hi"}]
SAMPLING = ("--temperature", 0, "--max-tokens", 6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mechanisms")


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("recipe", ["none", "int8"])
def test_build_run_chat_and_compare(
    mechanism: str, recipe: str, folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, engine = folder / mechanism, folder / "engines" / f"{mechanism}-{recipe}"
    if not checkpoint.exists():
        save_checkpoint(mechanism, checkpoint)
    code, result, _ = cli(
        "build", checkpoint, "-o", engine, "-q", recipe, "--dtype", "float32", "--json"
    )
    assert (code, result["acceptance"]["accepted"]) == (0, True)
    code, generated, _ = cli("run", engine, "--prompt", "hi", *SAMPLING, "--json")
    assert code == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    code, chat, _ = cli("chat", engine, *SAMPLING)
    assert code == 0
    assert generated["outputs"][0]["text"].strip() in chat
    code, comparison, _ = cli("compare", engine, checkpoint, "--json")
    assert (code, comparison["accepted"]) == (0, True)


def test_one_server_has_them_all(folder: Path, cli: Cli) -> None:
    engines = folder / "served"
    answers = {}
    for mechanism in MECHANISMS:
        name = mechanism.replace(" ", "-")
        checkpoint = folder / "to serve" / mechanism
        save_checkpoint(mechanism, checkpoint)
        code, _, _ = cli("build", checkpoint, "-o", engines / name, "--dtype", "float32")
        assert code == 0
        _, generated, _ = cli("run", engines / name, "--prompt", "hi", *SAMPLING, "--json")
        answers[name] = generated["outputs"][0]["text"]
    words = ("--models-dir", engines, "--memory-budget", 40_000_000)
    with ServerProcess(*words, flags=("--device", "cpu")) as server:
        for name, text in answers.items():
            body = {"model": name, "messages": ASK, "temperature": 0, "max_tokens": 6}
            status, answer, _ = server.request("/v1/chat/completions", body)
            assert (status, answer["choices"][0]["message"]["content"]) == (200, text), name
