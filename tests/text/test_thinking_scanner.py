"""Where the thinking of an answer is, so that stop strings end only what follows it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.request_output_state import SequenceDetokenizer
from modelmill.text.answer_parser import make_answer_parser
from modelmill.text.answer_pieces import collect_answer
from modelmill.text.chat_format_registry import list_chat_formats, load_chat_syntax
from modelmill.text.thinking_scanner import (
    AnswerThinkingSyntax,
    ThinkingScanner,
    make_answer_thinking_syntax,
)
from tests.hypothesis_examples import examples

THINKING_FORMATS = [
    name for name in list_chat_formats() if load_chat_syntax(name).thinking is not None
]
SCOPE = AnswerThinkingSyntax("<think>", ("</think>",), begun=False, repeats=False)


def scan(scope: AnswerThinkingSyntax, pieces: list[str]) -> list[tuple[str, bool]]:
    """The spans of a text in pieces; neighbours of a kind are one."""
    scanner, out = ThinkingScanner(scope), list[tuple[str, bool]]()
    for text, thinks in [
        *(span for each in pieces for span in scanner.push(each)),
        *scanner.flush(),
    ]:
        if out and out[-1][1] == thinks:
            out[-1] = (out[-1][0] + text, thinks)
        else:
            out.append((text, thinks))
    return out


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("<think>a</think>b", [("<think>a</think>", True), ("b", False)]),
        (" \n<think>a", [(" \n<think>a", True)]),
        ("b<think>a</think>", [("b<think>a</think>", False)]),
        ("<thin", [("<thin", False)]),
        ("<think>a</think>b<think>c", [("<think>a</think>", True), ("b<think>c", False)]),
        ("  ", [("  ", False)]),
        ("", []),
    ],
)
def test_where_the_thinking_is(text: str, spans: list[tuple[str, bool]]) -> None:
    assert scan(SCOPE, [text]) == spans
    assert scan(SCOPE, list(text)) == spans


@pytest.mark.parametrize("name", THINKING_FORMATS)
def test_the_parser_of_each_format_agrees(name: str) -> None:
    """The stop string is in the thinking and in the content: the latter ends the answer."""
    syntax = load_chat_syntax(name)
    assert syntax.thinking is not None
    opening, closing = syntax.thinking.open, syntax.thinking.close
    between = "<|start|>assistant<|channel|>final<|message|>" if name == "gpt_oss" else ""
    content = syntax.content[0] if syntax.content else ""
    for prompt_thinking, begin in (("free", opening), ("open", "")):
        text = f"{begin}A STOP b{closing}{between}{content}Yes STOP no"
        scope = make_answer_thinking_syntax(syntax, syntax.thinking, prompt_thinking, "", False)  # type: ignore[arg-type]
        spans = scan(scope, list(text))  # type: ignore[arg-type]
        assert [thinks for _, thinks in spans] == [True, False]
        assert "A STOP b" in spans[0][0]
        assert spans[1][0].endswith("Yes STOP no")
        begun = "reasoning" if name == "gpt_oss" and not begin else ""
        parser = make_answer_parser(
            syntax,
            thinking=syntax.thinking,
            thinks=not begin,
            begun=begun,  # type: ignore[arg-type]
        )
        answer = collect_answer([*parser.push(text), *parser.flush()])
        assert answer.reasoning.strip() == "A STOP b"
        assert answer.content.strip() == "Yes STOP no"


def test_thinking_between_the_messages_of_gpt_oss() -> None:
    syntax = load_chat_syntax("gpt_oss")
    scope = make_answer_thinking_syntax(syntax, syntax.thinking, "free", "", False)
    first = "<|channel|>analysis<|message|>a<|end|>"
    middle = "<|start|>assistant<|channel|>commentary<|message|>b<|end|><|start|>assistant"
    last = "<|start|>assistant<|channel|>final<|message|>d"
    assert scope is not None
    spans = scan(scope, list(f"{first}{middle}{first}{last}"))
    assert spans == [(first, True), (middle, False), (first, True), (last, False)]


def test_a_call_ends_the_thinking_where_it_does_in_the_parser() -> None:
    syntax = load_chat_syntax("deepseek_v31")
    text = "why<｜tool▁calls▁begin｜>f"
    for calls, spans in (
        (True, [("why<｜tool▁calls▁begin｜>", True), ("f", False)]),
        (False, [(text, True)]),
    ):
        scope = make_answer_thinking_syntax(syntax, syntax.thinking, "open", "", calls)
        assert scope is not None
        assert scan(scope, list(text)) == spans


@settings(deadline=None, max_examples=examples(200, 50))
@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "think>", "a", " ", "\n"]), max_size=9),
    st.data(),
)
def test_the_cut_does_not_matter(parts: list[str], draw: Any) -> None:
    text = "".join(parts)
    for begun in (False, True):
        for repeats in (False, True):
            scope = AnswerThinkingSyntax("<think>", ("</think>",), begun, repeats)
            cuts = sorted(draw.draw(st.lists(st.integers(0, len(text)), max_size=4)))
            pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            assert scan(scope, pieces) == scan(scope, [text])
            assert "".join(each for each, _ in scan(scope, pieces)) == text


class _Letters:
    """A detokenizer of one letter a token."""

    def push(self, id: int) -> str:
        return chr(id)

    def flush(self) -> str:
        return ""


def read(
    text: str, stops: list[str], scope: AnswerThinkingSyntax | None, min_tokens: int = 0
) -> Any:
    """(text, matched stop string) of an answer of one letter a token."""
    detokenizer = SequenceDetokenizer(_Letters(), stops, False, scope)  # type: ignore[arg-type]
    out = ""
    for index, char in enumerate(text):
        emit, stopped = detokenizer.push(ord(char), check_stops=index >= min_tokens)
        out += emit
        if stopped:
            return out, detokenizer.matched
    return out + detokenizer.flush(), None


def test_a_stop_string_counts_behind_the_thinking_only() -> None:
    text = "<think>Q: a</think>b Q: c"
    assert read(text, ["Q:"], None) == ("<think>", "Q:")
    assert read(text, ["Q:"], SCOPE) == ("<think>Q: a</think>b ", "Q:")
    assert read(text, ["</think>", "think"], SCOPE) == (text, None)
    # nor from the thinking into the content
    assert read("<think>Q</think>: c", ["Q:", "Q</think>: c"], SCOPE) == (
        "<think>Q</think>: c",
        None,
    )
    assert read("<think>Q", ["Q"], SCOPE) == ("<think>Q", None)
    assert read("<thi", ["<thi"], SCOPE)[0] == ""
    assert read("Q: b", ["Q:"], SCOPE) == ("", "Q:")


def test_min_tokens_and_thinking() -> None:
    text = "<think>Q</think>aQbQc"
    assert read(text, ["Q"], SCOPE, min_tokens=18) == ("<think>Q</think>aQb", "Q")
    assert read(text, ["Q"], SCOPE, min_tokens=2) == ("<think>Q</think>a", "Q")
