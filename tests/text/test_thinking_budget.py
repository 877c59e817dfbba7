"""When the budget of the thinking is spent, the closing mark comes; the rest is not touched."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modelmill.core.types import Grammar
from modelmill.text.answer_grammar import PromptThinking, whole_answer_grammar
from modelmill.text.chat_syntax import ThinkingSyntax
from modelmill.text.grammar import GuideFactory, check_grammar
from modelmill.text.thinking_budget import is_cut_in_forced_thinking_end
from tests.text.answer_sampler import END, MarkTokenizer

THINK = ThinkingSyntax()
INNER = Grammar("json", json.dumps({"const": 7}))


def guide_of(grammar: Grammar | None, *, control: bool) -> tuple[Any, MarkTokenizer]:
    tokenizer = MarkTokenizer(["<think>", "</think>"], control)
    assert grammar is not None
    check_grammar(grammar)
    guides = GuideFactory(tokenizer, tokenizer.vocab_size, (END,))  # type: ignore[arg-type]
    return guides.make_guide(grammar, (END,)), tokenizer


def write(guide: Any, tokenizer: MarkTokenizer, preferred: bytes, steps: int) -> bytes:
    """Write the same byte over and over, where it is allowed; else the first that is."""
    out = b""
    for _ in range(steps):
        bits = guide.mask()
        allowed = [i for i in range(tokenizer.vocab_size) if bits[i >> 3] >> (i & 7) & 1]
        assert allowed
        token = preferred[0] if preferred[0] in allowed else allowed[0]
        if token == END:
            return out
        out += tokenizer.token_bytes(token)
        guide.accept(token)
    return out


@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize("budget", [0, 5])
def test_the_thinking_ends_at_its_budget_and_the_schema_follows(budget: int, control: bool) -> None:
    grammar = whole_answer_grammar(INNER, "hermes", THINK, "open", budget)
    guide, tokenizer = guide_of(grammar, control=control)
    copied = guide.copy()
    text = write(guide, tokenizer, b"x", 60)
    head = b"x" * 5 + b"\n</think>" if budget else b"</think>"
    assert text.startswith(head)
    assert json.loads(text.partition(b"</think>")[2]) == 7
    assert not guide.failed
    assert write(copied, tokenizer, b"x", 60) == text


@pytest.mark.parametrize("state", ["open", "free"])
def test_whether_an_answer_ends_in_the_mark_that_was_forced(state: PromptThinking) -> None:
    grammar = whole_answer_grammar(INNER, "hermes", THINK, state, 3)
    guide, tokenizer = guide_of(grammar, control=False)
    opening = b"<think>" if state == "free" else b""
    for byte in opening:
        guide.accept(byte)
    answer = opening + write(guide, tokenizer, b"<", 60)
    forced = len(b"\n</think>")
    begin = len(opening) + 3
    assert answer[begin:].startswith(b"\n</think>")
    ends = [
        is_cut_in_forced_thinking_end(tokenizer, grammar, answer[:size])  # type: ignore[arg-type]
        for size in range(len(answer) + 1)
    ]
    # the last character of the mark ends the thinking
    assert [size for size, is_inside in enumerate(ends) if is_inside] == list(
        range(begin + 1, begin + forced)
    )
    for other in (None, INNER, whole_answer_grammar(INNER, "hermes", THINK, state)):
        assert not is_cut_in_forced_thinking_end(tokenizer, other, answer[: begin + 2])  # type: ignore[arg-type]


def test_without_a_schema_only_the_thinking_is_limited() -> None:
    grammar = whole_answer_grammar(None, "hermes", THINK, "open", 3)
    guide, tokenizer = guide_of(grammar, control=False)
    text = write(guide, tokenizer, b"x", 40)
    assert text.startswith(b"xxx\n</think>\n\nxxxx")


def test_a_model_that_does_not_think_is_not_made_to() -> None:
    grammar = whole_answer_grammar(None, "hermes", THINK, "free", 3)
    guide, tokenizer = guide_of(grammar, control=False)
    assert write(guide, tokenizer, b"x", 40) == b"x" * 40


def test_thinking_that_the_model_begins_counts_from_its_mark() -> None:
    grammar = whole_answer_grammar(INNER, "hermes", THINK, "free", 2)
    guide, tokenizer = guide_of(grammar, control=True)
    opening = tokenizer.special["<think>"]
    assert guide.mask()[opening >> 3] >> (opening & 7) & 1
    guide.accept(opening)
    assert write(guide, tokenizer, b"x", 60).startswith(b"xx\n</think>")


def test_what_the_format_adds_nothing_to_stays_as_it_is() -> None:
    assert whole_answer_grammar(INNER, "hermes", THINK, "closed", 5) == INNER
    assert whole_answer_grammar(INNER, "hermes", None, "free") == INNER
    assert whole_answer_grammar(None, "hermes", THINK, "closed", 5) is None
    assert whole_answer_grammar(None, "hermes", THINK, "open") is None
