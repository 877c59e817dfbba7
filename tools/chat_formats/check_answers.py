"""The check of one random answer: streamed = whole = written back, and nothing leaks."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import replace

from modelmill.text.answer_parser import make_answer_parser
from modelmill.text.answer_pieces import AnswerPiece, ParsedAnswer, collect_answer
from modelmill.text.answer_renderer import render_answer
from modelmill.text.chat_syntax import ChatSyntax
from tools.chat_formats.random_answers import RandomCase, forbidden_texts, random_case, random_cuts

ENDED_SHARE = 0.25
"""Share of the answers that are also checked with an end in the middle, and share with a fault."""


def parse_pieces(
    syntax: ChatSyntax, case: RandomCase, texts: Iterable[str], cut: bool = False
) -> ParsedAnswer:
    """Parse an answer that comes in pieces."""
    parser = make_answer_parser(
        syntax, case.tools, thinking=case.thinking, thinks=case.thinks and case.thinking is not None
    )
    pieces: list[AnswerPiece] = []
    for text in texts:
        pieces += parser.push(text)
    return collect_answer([*pieces, *parser.flush(cut)])


def check_answer(syntax: ChatSyntax, rng: random.Random) -> None:
    """Check one random answer, whole and cut off.

    Raises:
        AssertionError: it fails; the message has the text.
    """
    case = random_case(syntax, rng)
    text = render_answer(syntax, case.answer, thinking=case.thinking, thinks=case.thinks)
    whole = parse_pieces(syntax, case, [text])
    assert _meaning(syntax, whole) == _meaning(syntax, case.answer), (text, whole, case)
    streamed = parse_pieces(syntax, case, random_cuts(text, rng))
    assert _meaning(syntax, streamed) == _meaning(syntax, whole), (text, streamed, whole)
    back = render_answer(
        syntax, _with_ids(syntax, streamed, case), thinking=case.thinking, thinks=case.thinks
    )
    assert back == text, (back, text)
    _check_cut(syntax, case, text[: rng.randint(0, len(text))], rng)
    if rng.random() < ENDED_SHARE:
        _check_ended(syntax, case, text[: rng.randint(0, len(text))], rng)
    if rng.random() < ENDED_SHARE:
        _check_broken(syntax, case, text, rng)


def _check_cut(syntax: ChatSyntax, case: RandomCase, text: str, rng: random.Random) -> None:
    """An answer that a limit cut off: the same however it comes, a begin of the whole, no mark."""
    whole = parse_pieces(syntax, case, [text], cut=True)
    streamed = parse_pieces(syntax, case, random_cuts(text, rng), cut=True)
    assert _meaning(syntax, streamed) == _meaning(syntax, whole), (text, streamed, whole)
    for call, full in zip(whole.calls, case.answer.calls, strict=False):
        assert call.name == full.name, (text, whole)
        assert full.arguments.startswith(call.arguments), (text, whole)
    assert len(whole.calls) <= len(case.answer.calls)
    if syntax.calls.style == "react":
        return  # its labels are ordinary words: a thought is content until a call follows
    for mark in forbidden_texts(syntax):
        assert mark not in whole.content, (mark, text, whole)
        assert mark not in whole.reasoning, (mark, text, whole)


def _check_ended(syntax: ChatSyntax, case: RandomCase, text: str, rng: random.Random) -> None:
    """An answer that the model itself ends early: the same however it comes, arguments are JSON."""
    whole = parse_pieces(syntax, case, [text])
    streamed = parse_pieces(syntax, case, random_cuts(text, rng))
    assert _meaning(syntax, streamed) == _meaning(syntax, whole), (text, streamed, whole)
    for call in whole.calls:
        assert is_json(call.arguments), (text, whole)


def _check_broken(syntax: ChatSyntax, case: RandomCase, text: str, rng: random.Random) -> None:
    """An answer in which the model leaves some characters out, ended by it or by a limit."""
    begin = rng.randint(0, len(text))
    text = text[:begin] + text[begin + rng.randint(1, 3) :]
    _check_ended(syntax, case, text, rng)
    whole = parse_pieces(syntax, case, [text], cut=True)
    streamed = parse_pieces(syntax, case, random_cuts(text, rng), cut=True)
    assert _meaning(syntax, streamed) == _meaning(syntax, whole), (text, streamed, whole)


def is_json(text: str) -> bool:
    """Whether a text is one JSON value."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def is_json_prefix(text: str) -> bool:
    """Whether a text begins valid JSON and ends between two of its characters or values."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        # Python's decoder calls a complete escape at the end of the text an invalid one
        unterminated = error.msg.startswith(("Unterminated string", "Invalid \\uXXXX escape"))
        return unterminated or error.pos >= len(text.rstrip())
    return True


def _meaning(syntax: ChatSyntax, answer: ParsedAnswer) -> tuple[object, ...]:
    """What has to be equal; random ids need not."""
    in_head = syntax.calls.id_from_head or "{id}" in syntax.calls.head
    calls = [(call.name, call.arguments, call.id if in_head else "") for call in answer.calls]
    return answer.content, answer.reasoning, calls


def _with_ids(syntax: ChatSyntax, answer: ParsedAnswer, case: RandomCase) -> ParsedAnswer:
    if syntax.calls.id_from_head or "{id}" in syntax.calls.head:
        return answer
    calls = zip(answer.calls, case.answer.calls, strict=True)
    return replace(answer, calls=tuple(replace(call, id=own.id) for call, own in calls))
