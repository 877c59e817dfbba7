"""Chatting with checkpoints of families that have no chat template, as a user does."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from modelmill import LLM
from modelmill.artifact.store import open_artifact
from tests.models.all_families import CASES

Cli = Callable[..., tuple[int, Any, str]]
CHAT = {"user_token_id": 195, "assistant_token_id": 196, "eos_token_id": 2}


def save(family: str, folder: Path, shared: Path, generation: dict[str, Any] | None) -> Path:
    """A seeded checkpoint with a vocabulary of 512 pieces and no chat template."""
    folder.mkdir()
    case = CASES[family]
    assert case.make is not None
    case.make(case.raw() | {"vocab_size": 512, "eos_token_id": 2}, folder)
    pieces = (shared / "data/models/stories260K/pieces.json").read_bytes()
    (folder / "pieces.json").write_bytes(pieces)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def chat(cli: Cli, monkeypatch: pytest.MonkeyPatch, *words: object) -> tuple[int, Any, str]:
    monkeypatch.setattr(sys, "stdin", StringIO("Hi\n"))
    return cli("chat", *words, "--temperature", 0, "--max-tokens", 2)


def test_baichuan_chats_by_its_ids(
    cli: Cli, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, engine = save("baichuan", tmp_path / "m", shared, CHAT), tmp_path / "e"
    code, out, err = cli("build", source, "-o", engine, "--target", "cpu")
    assert code == 0, err
    remark = "baichuan: built in for this family, since the checkpoint has no chat template"
    assert f"chat template {remark}" in " ".join(out.split())
    assert "without effect" not in err
    assert open_artifact(engine).manifest.source["chat_template"].startswith(remark)
    assert "chat_template baichuan: built in" in " ".join(cli("inspect", engine)[1].split())
    with LLM(engine, device="cpu", threads=1) as llm:
        turns = [{"role": "user", "content": "Hi"}]
        [answer] = [llm.chat(turns)]
        prompt = list(answer[0].prompt_token_ids)
        assert llm.tokenizer is not None
        assert prompt == [195, *llm.tokenizer.encode("Hi", bos=False), 196]
        assert llm.chat_format is not None
        assert llm.chat_format.stop_ids[-1] == 195
    assert chat(cli, monkeypatch, engine)[0] == 0


def test_a_base_model_has_none_until_a_name_is_given(
    cli: Cli, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save("baichuan", tmp_path / "m", shared, None)
    engine = tmp_path / "e"
    code, out, err = cli("build", source, "-o", engine, "--target", "cpu", "--no-check")
    assert code == 0, err
    assert "chat template" not in out
    code, _, err = chat(cli, monkeypatch, engine)
    assert code != 0
    assert "give one with --chat-template (baichuan, chatglm2, " in err
    for name in ("baichuan", "falcon"):
        assert chat(cli, monkeypatch, engine, "--chat-template", name)[0] == 0
    code, _, err = chat(cli, monkeypatch, engine, "--chat-template", "chatglm3")
    assert code != 0
    assert "chatglm3 needs the control token <|user|>" in err
