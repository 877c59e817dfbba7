"""Tools, thinking and other models within one chat."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from modelmill.cli.chat import ChatSession
from modelmill.cli.chat_model import ChatDelta, ChatSettings
from modelmill.cli.remote_chat import parse_delta_pieces, tool_and_thinking_fields
from modelmill.core.errors import RequestError, UsageError
from modelmill.core.types import SamplingParams
from modelmill.outputs import CompletionOutput, RequestOutput
from modelmill.text.answer_pieces import AnswerPiece, ReasoningDelta, ToolCallDelta

Cli = Callable[..., tuple[int, Any, str]]
CALL = [ToolCallDelta(0, "", "c1", "weather"), ToolCallDelta(0, '{"city": "Rome"}')]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


class ScriptedModel:
    """Answers with given pieces, in order; keeps what it was asked."""

    def __init__(self, *answers: Sequence[AnswerPiece] | Exception) -> None:
        self.answers = iter(answers)
        self.requests: list[tuple[list[dict[str, Any]], ChatSettings]] = []

    def stream(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams, settings: ChatSettings
    ) -> Iterator[ChatDelta]:
        self.requests.append((list(messages), settings))
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        output = RequestOutput("r", None, [1], [CompletionOutput(0)])
        for piece in answer:
            yield ChatDelta([piece], output)


@pytest.fixture
def tools_file(tmp_path: Path) -> Path:
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(TOOLS))
    return file


def roles(session: ChatSession) -> list[str]:
    return [each["role"] for each in session.messages]


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_is_shown_and_its_result_is_answered(
    tools_file: Path, capsys: pytest.CaptureFixture[str], stream: bool
) -> None:
    model = ScriptedModel(["Look: ", *CALL], ["It is sunny."])
    session = ChatSession(
        model, SamplingParams(), None, stream=stream, read_result=lambda prompt: f"<{prompt}>"
    )
    session.handle_line(f"/tools {tools_file}")
    session.handle_line("Weather in Rome?")
    assert model.requests[0][1].tools == tuple(TOOLS)
    assert roles(session) == ["user", "assistant", "tool", "assistant"]
    assert session.messages[2]["content"] == "<weather= >"
    assert capsys.readouterr().out.splitlines() == [
        "weather()",
        "Look:",
        '[call] weather({"city": "Rome"})',
        "It is sunny.",
    ]
    session.handle_line("/tools off")
    session.handle_line("/tools")
    assert session.settings.tools == ()
    assert capsys.readouterr().out.splitlines() == ["(no tools)", "(none)"]


def test_a_call_without_a_result_ends_the_turn(capsys: pytest.CaptureFixture[str]) -> None:
    session = ChatSession(ScriptedModel(CALL), SamplingParams(), None)
    session.handle_line("Weather?")
    assert roles(session) == ["user", "assistant"]
    assert "stay without results" in capsys.readouterr().err


def test_a_turn_with_calls_is_forgotten_whole() -> None:
    model = ScriptedModel(CALL, ["Sun"], RequestError("too long"), ["Yes"])
    session = ChatSession(model, SamplingParams(), "S", read_result=lambda _: "x")
    session.handle_line("Weather?")
    session.handle_line("Sure?")
    assert roles(session) == ["system", "user", "assistant"]
    assert session.messages[1]["content"] == "Sure?"


def test_thinking_is_shown_apart_and_not_stored(capsys: pytest.CaptureFixture[str]) -> None:
    model = ScriptedModel([ReasoningDelta("Two and"), ReasoningDelta(" two"), "4"])
    session = ChatSession(model, SamplingParams(), None)
    for line in ("/think on 64", "What is 2+2?", "/think", "/think auto", "/think off"):
        session.handle_line(line)
    settings = model.requests[0][1]
    assert (settings.thinks, settings.thinking_budget) == (True, 64)
    assert session.messages[-1] == {"role": "assistant", "content": "4"}
    assert capsys.readouterr().out.splitlines() == [
        "(thinking: on, at most 64 tokens)",
        "[thinking] Two and two",
        "[answer] 4",
        "(thinking: on, at most 64 tokens)",
        "(thinking: auto)",
        "(thinking: off)",
    ]
    assert (session.settings.thinks, session.settings.thinking_budget) == (False, None)


@pytest.mark.parametrize("line", ["/think maybe", "/think on many", "/think on 0", "/tools /no"])
def test_a_wrong_setting_changes_nothing(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    session = ChatSession(ScriptedModel(), SamplingParams(), None)
    before = session.settings
    assert session.handle_line(line)
    assert session.settings is before
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)


def test_what_a_server_is_sent_and_answers() -> None:
    settings = ChatSettings(tuple(TOOLS), False, 9)
    assert tool_and_thinking_fields(ChatSettings()) == {}
    assert tool_and_thinking_fields(settings) == {
        "tools": TOOLS,
        "chat_template_kwargs": {"enable_thinking": False},
        "thinking_token_budget": 9,
    }
    call = {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": "{"}}
    assert parse_delta_pieces({"reasoning": "Hm", "content": "So", "tool_calls": [call]}) == [
        ReasoningDelta("Hm"),
        "So",
        ToolCallDelta(0, "{", "c1", "weather"),
    ]
    assert parse_delta_pieces({"role": "assistant", "content": ""}) == []


def test_an_engine_is_changed_for_another(
    cli: Cli, engine: Path, tmp_path: Path, tools_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "second.engine"
    link.symlink_to(engine)
    lines = f"/model\nHello\n/model {link}\n/model\n/model {tmp_path}/none\nAgain\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    words = ("--chat-template", "chatml", "--temperature", 0, "--max-tokens", 4)
    code, out, err = cli("chat", engine, *words, "--tools", tools_file)
    assert code == 0, err
    assert f"* {engine}" in out
    assert f"* {link}" in out
    assert f"({link} answers from now on)" in out
    assert f"{tmp_path}/none" in err
    assert err.count("tokens/s") == 2


def test_thinking_that_a_template_does_not_have(
    cli: Cli, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    code, _, err = cli("chat", engine, "--chat-template", "chatml", "--think", "on")
    assert code == 0
    assert "has no thinking" in err
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    code, _, err = cli("chat", engine, "--chat-template", "chatml", "--think", "off")
    assert code == 0
    assert "tokens/s" in err, "it does not think: nothing to refuse"


def test_thinking_is_refused_where_it_is_set(
    cli: Cli, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next message is answered; a folder is no file."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"/think on\n/think\n/save {tmp_path}\n"))
    code, out, err = cli("chat", engine, "--chat-template", "chatml")
    assert code == 0
    assert "has no thinking" in err
    assert out.splitlines()[-2:] == [
        "(thinking: auto)", f"{tmp_path} is a folder; give a file's name"
    ]  # fmt: skip


def test_flags_that_are_wrong(cli: Cli, engine: Path, tmp_path: Path) -> None:
    for words in (("--think", "x"), ("--think-tokens", 0), ("--tools", tmp_path / "none")):
        code, _, err = cli("chat", engine, *words)
        assert (code, err.count("\n")) == (2, 1), err


def test_the_errors_of_a_model_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    session = ChatSession(ScriptedModel(UsageError("no thinking")), SamplingParams(), None)
    assert session.handle_line("Hello")
    assert session.messages == []
    assert capsys.readouterr().err == "modelmill: no thinking\n"
