"""Answers whose first mark the prompt begins (Functionary 3.2)."""

from __future__ import annotations

import pytest

from modelmill.core.types import Grammar
from modelmill.text.answer_grammar import whole_answer_grammar
from modelmill.text.answer_parser import make_answer_parser
from modelmill.text.answer_pieces import ParsedAnswer, ParsedToolCall, collect_answer
from modelmill.text.answer_renderer import render_answer
from modelmill.text.chat_format_registry import load_chat_syntax
from modelmill.text.tool_grammar import forced_call_grammar, optional_strict_call_grammar
from tests.text.random_schemas import END, GUIDES

NAME = "functionary_v32"
TOOL = {
    "function": {
        "name": "f",
        "strict": True,
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
    }
}


def parse(text: str, size: int, cut: bool = False) -> ParsedAnswer:
    parser = make_answer_parser(load_chat_syntax(NAME), {"f": None, "forecast": None})
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return collect_answer([*(p for each in pieces for p in parser.push(each)), *parser.flush(cut)])


# answer, content, names of the calls
CASES = [
    ("all\nHi.", "Hi.", []),
    ('f\n{"n": 1}', "", ["f"]),
    ('forecast\n{"n": 1}>>>f\n{"n": 1}', "", ["forecast", "f"]),
    ('all\nLet me see.>>>f\n{"n": 1}', "Let me see.", ["f"]),
    ('f\n{"n": 1}>>>all\nDone.', "Done.", ["f"]),
    # the prompt has not begun the mark
    (">>>all\nHi.", "Hi.", []),
    ('>>>f\n{"n": 1}', "", ["f"]),
    # no mark at all; no call of a tool; a prompt of Python
    ("fine", "fine", []),
    ("f", "f", []),
    ('g\n{"n": 1}', 'g\n{"n": 1}', []),
    ("all\n>>> f(1)", ">>> f(1)", []),
    ('all\n<b>Hi</b>>>>f\n{"n": 1}', "<b>Hi</b>", ["f"]),
    ("f\nprint(1)", ">>>f\nprint(1)", []),
]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("text", "content", "names"), CASES)
def test_the_answer_continues_the_mark(
    text: str, content: str, names: list[str], size: int
) -> None:
    answer = parse(text, size)
    assert [call.name for call in answer.calls] == names
    assert all(call.arguments == '{"n": 1}' for call in answer.calls)
    assert answer.content == content


@pytest.mark.parametrize("text", ["al", "fore", "f\n", "all\nHi.>>>"])
def test_a_mark_that_a_limit_cuts_off_is_no_content(text: str) -> None:
    answer = parse(text, 1, cut=True)
    assert answer.content in ("", "Hi.")
    assert not answer.calls


def test_one_character_of_a_mark_behind_a_call_is_no_content() -> None:
    parser = make_answer_parser(load_chat_syntax("functionary_v32"), ["f"])
    pieces = parser.push("all\nso >>>>>f\n{}>>") + parser.flush(cut=True)
    answer = collect_answer(pieces)
    assert answer.content == "so >>"
    assert [call.name for call in answer.calls] == ["f"]


def test_an_answer_is_written_without_what_the_prompt_writes() -> None:
    call = ParsedToolCall("1", "f", '{"n": 1}')
    syntax = load_chat_syntax(NAME)
    assert render_answer(syntax, ParsedAnswer("", (call,))) == 'f\n{"n": 1}'
    assert render_answer(syntax, ParsedAnswer("Hi", (call,))) == 'all\nHi>>>f\n{"n": 1}'


def takes(inner: Grammar | None, text: str) -> bool:
    """Whether a constraint allows a whole answer."""
    grammar = whole_answer_grammar(inner, NAME, None, "closed")
    assert grammar is not None
    guide = GUIDES.make_guide(grammar, (END,))
    for id in (*text.encode(), END):
        if not guide.mask()[id >> 3] >> (id & 7) & 1:
            return False
        guide.accept(id)
    return True


def test_a_constraint_begins_behind_the_prompt() -> None:
    forced = forced_call_grammar([TOOL], None)
    strict = optional_strict_call_grammar([TOOL], True, as_json=True)
    schema = Grammar("json", '{"type": "integer"}')
    call = 'f\n{"n": 1}'
    for text, constraints in (
        (call, (forced, strict)),
        (f">>>{call}", ()),
        ("all\n1", (strict, schema)),
        ("1", (schema,)),
        (f"all\nSo.>>>{call}>>>{call}", (strict,)),
        ('all\nSo.>>>f\n{"n": "1"}', ()),
        (f"all\n{call}", (strict,)),
    ):
        for each in (forced, strict, schema):
            assert takes(each, text) == any(each is fits for fits in constraints), (text, each)
