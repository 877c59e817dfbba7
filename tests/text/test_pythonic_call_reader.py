"""A list of calls that a model repeats behind its end (LFM2)."""

from __future__ import annotations

import pytest

from modelmill.text.answer_parser import make_answer_parser
from modelmill.text.answer_pieces import ParsedAnswer, collect_answer
from modelmill.text.chat_format_registry import load_chat_syntax

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
LIST = "[f(x='a]b', n=1), f(n=2)]"
ONCE = ['{"x": "a]b", "n": 1}', '{"n": 2}']
CALLS = f"{OPEN}{LIST}{CLOSE}"
# answer, content, arguments
CASES = [
    (f"{CALLS}{LIST}{CLOSE}", "", ONCE),
    (f"so {CALLS}\n{LIST}{CLOSE}{LIST}{CLOSE}done", "so done", ONCE),
    (f"{CALLS}{LIST} done", "done", ONCE),
    # the answer ends inside the repeat
    (f"{CALLS}{LIST[:9]}", "", ONCE),
    # no repeat: another call, an own section, text
    (f"{CALLS}[f(n=3)]{CLOSE}", "", [*ONCE, '{"n": 3}']),
    (f"{CALLS}{CALLS}", "", [*ONCE, *ONCE]),
    (f"{CALLS}[1] is", "[1] is", ONCE),
]


def parse(name: str, text: str, size: int, cut: bool = False) -> ParsedAnswer:
    parser = make_answer_parser(load_chat_syntax(name), {"f": None})
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return collect_answer([*(p for each in pieces for p in parser.push(each)), *parser.flush(cut)])


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(("text", "content", "arguments"), CASES)
def test_a_repeat_of_the_list_is_no_second_call(
    text: str, content: str, arguments: list[str], size: int
) -> None:
    for cut in (False, True):
        answer = parse("lfm2", text, size, cut)
        assert [call.arguments for call in answer.calls] == arguments
        assert answer.content == content


def test_other_formats_take_a_second_list_for_calls() -> None:
    text = "<function_calls>f(n=1)</function_calls>"
    answer = parse("olmo3", f"{text}\n{text}", 3)
    assert [call.arguments for call in answer.calls] == ['{"n": 1}', '{"n": 1}']
