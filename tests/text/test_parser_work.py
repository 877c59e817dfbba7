"""The work of a parser grows with the answer's length, not with its square."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from modelmill.text import drifted_mark
from modelmill.text.answer_parser import AnswerParser, make_answer_parser
from modelmill.text.answer_pieces import ParsedAnswer, ParsedToolCall, collect_answer
from modelmill.text.answer_renderer import render_answer
from modelmill.text.chat_format_registry import list_chat_formats, load_chat_syntax
from modelmill.text.chat_syntax import ChatSyntax

FILLED = 2000
"""Characters that are put into an answer."""
READS_PER_CHAR = 100
"""Most characters that a linear parser reads per character of an answer."""
TOOLS = {
    "f": {
        "type": "object",
        "properties": {"town": {"type": "string"}, "days": {"type": "integer"}},
    }
}


class _Count:
    chars = 0


def _counted(parser: AnswerParser, count: _Count) -> AnswerParser:
    """Count what a parser reads: each look at its buffer, all of which it may read."""
    base = type(parser)

    def read(self: Any) -> str:
        text: str = vars(self)["_text"]
        count.chars += len(text)
        return text

    def write(self: Any, text: str) -> None:
        vars(self)["_text"] = text

    vars(parser)["_text"] = vars(parser).pop("_buffer")
    parser.__class__ = type(base.__name__, (base,), {"_buffer": property(read, write)})
    return parser


def _call_text(syntax: ChatSyntax) -> str:
    id = "functions.f:0" if syntax.calls.id_from_head else "abc123XYZ"
    call = ParsedToolCall(id, "f", '{"town": "Ulm", "days": 2}')
    return render_answer(syntax, ParsedAnswer("", (call,)), thinking=syntax.thinking)


def _pieces(text: str) -> Iterator[str]:
    for at in range(0, len(text), 4):
        yield text[at : at + 4]


@pytest.mark.parametrize("name", list_chat_formats())
def test_blanks_anywhere_in_a_call_are_read_once(name: str) -> None:
    syntax, rng = load_chat_syntax(name), random.Random(name)
    written = _call_text(syntax)
    for place in rng.sample(range(len(written)), 5):
        text = written[:place] + " " * FILLED + written[place:]
        count = _Count()
        parser = _counted(make_answer_parser(syntax, TOOLS, thinking=syntax.thinking), count)
        for piece in _pieces(text):
            parser.push(piece)
        parser.flush()
        assert count.chars < READS_PER_CHAR * len(text), (written[:place], count.chars)


@pytest.mark.parametrize("blank", [" ", "\n", "\u0120"])
def test_blanks_are_read_with_what_follows(blank: str) -> None:
    syntax = load_chat_syntax("hermes")
    parser = make_answer_parser(syntax, TOOLS, thinking=None)
    pieces = [each for text in ("a", blank, blank, blank, "b") for each in parser.push(text)]
    answer = collect_answer([*pieces, *parser.flush()])
    assert answer.content == f"a{blank * 3}b"


def test_an_open_value_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from modelmill.text import parameter_call_reader

    searched = list[int]()
    find_first_mark = parameter_call_reader.find_first_mark

    def counting(text: str, marks: tuple[str, ...], at: int = 0) -> tuple[int, str]:
        searched.append(len(text) - at)
        return find_first_mark(text, marks, at)

    monkeypatch.setattr(parameter_call_reader, "find_first_mark", counting)
    text = "<tool_call>\n<function=f>\n<parameter=days>\n" + "two " * (FILLED // 4)
    parser = make_answer_parser(load_chat_syntax("qwen3_coder"), TOOLS)
    pieces = [each for piece in _pieces(text) for each in parser.push(piece)]
    parser.push("\n</parameter>\n</function>\n</tool_call>")
    assert sum(searched) < READS_PER_CHAR * len(text)
    assert collect_answer([*pieces, *parser.flush()]).calls[0].name == "f"


@pytest.mark.parametrize(
    "call",
    [
        "<function=f>\n<parameter=town>\nUlm\n</parameter>\n</function>\n",
        f"<function=f>\n<parameter=days>\ntwo or\n</parameter>{' ' * 9}</function>\n",
    ],
)
def test_a_closing_mark_with_other_letters_is_searched_in_its_value_alone(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was searched up to the end of the answer for each value."""
    searched = list[int]()

    class Counting:
        """What the search may read, as it is given."""

        def __init__(self, pattern: re.Pattern[str]) -> None:
            self.match, self._pattern = pattern.match, pattern

        def search(self, text: str, at: int, end: int = sys.maxsize) -> re.Match[str] | None:
            searched.append(min(end, len(text)) - at)
            return self._pattern.search(text, at, end)

    compile_searches = drifted_mark._compile_searches
    monkeypatch.setattr(
        drifted_mark,
        "_compile_searches",
        lambda *marks: [Counting(each) for each in compile_searches(*marks)],
    )
    text = call * (10 * FILLED // len(call))
    parser = make_answer_parser(load_chat_syntax("qwen3_coder"), TOOLS)
    answer = collect_answer([*parser.push(text), *parser.flush()])
    assert len(answer.calls) == text.count("<function")
    assert len(searched) >= len(answer.calls)
    assert sum(searched) < 4 * len(text)


def test_a_bare_key_without_end_ends_its_call() -> None:
    parser = make_answer_parser(load_chat_syntax("gemma4"), TOOLS)
    text = "<|tool_call>call:f{days:2," + "x" * 1100
    whole = collect_answer([*parser.push(text), *parser.flush()])
    assert [(call.name, call.arguments) for call in whole.calls] == [("f", '{"days": 2}')]


@pytest.mark.parametrize("begin", ["<|channel|>", "<|start|>assistant<|channel|>", "to="])
def test_a_header_without_end_is_content(begin: str) -> None:
    """gpt-oss: it was read again and again, for ever."""
    parser = make_answer_parser(load_chat_syntax("gpt_oss"), TOOLS)
    text = "word " * 200
    pieces = [each for piece in _pieces(begin + text) for each in parser.push(piece)]
    answer = collect_answer([*pieces, *parser.flush()])
    assert text.strip() in answer.content
    assert "<|channel|>" not in answer.content
