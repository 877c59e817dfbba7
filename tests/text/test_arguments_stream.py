"""Arguments as clients get them: numbers, surrogates, and what a model leaves open or breaks."""

from __future__ import annotations

import json
import sys

import pytest

from modelmill.text.answer_parser import make_answer_parser
from modelmill.text.answer_pieces import ToolCallDelta, collect_answer
from modelmill.text.arguments_stream import (
    LARGEST_FLOAT,
    LARGEST_INTEGER,
    ArgumentsStream,
    clamp_number_to_double,
)
from modelmill.text.chat_format_registry import load_chat_syntax

SIZES = [1, 2, 5, 1000]
HERMES = '<tool_call>\n{{"name": "f", "arguments": {}\n</tool_call>'


def append_all(text: str, size: int) -> tuple[ArgumentsStream, str]:
    stream = ArgumentsStream()
    return stream, "".join(stream.append(text[at : at + size]) for at in range(0, len(text), size))


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        ("1e999", LARGEST_FLOAT),
        ("-1E+400", f"-{LARGEST_FLOAT}"),
        ("9" * 5000, LARGEST_INTEGER),
        ("-" + "9" * 309, f"-{LARGEST_INTEGER}"),
        ("1" + "0" * 400 + ".5", LARGEST_FLOAT),
    ],
)
def test_a_number_has_the_range_of_a_double(number: str, expected: str) -> None:
    assert clamp_number_to_double(number) == expected
    assert abs(float(expected)) <= sys.float_info.max


@pytest.mark.parametrize(
    "number",
    ["1" + "0" * 308, LARGEST_INTEGER, "1e308", "1e-999", "-0.0", "12345678901234567890123"],
)
def test_a_number_within_it_keeps_its_text(number: str) -> None:
    assert clamp_number_to_double(number) == number


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (r'{"a": "lone \ud83d end", "b": 2}', r'{"a": "lone \ufffd end", "b": 2}'),
        (r'{"a": "\ud83d\ude00"}', r'{"a": "\ud83d\ude00"}'),
        (r'{"a": "\uD83D\uD83D\uDE00"}', r'{"a": "\ufffd\uD83D\uDE00"}'),
        (r'{"a": "\ude00\ud83d"}', r'{"a": "\ufffd\ufffd"}'),
        (r'{"a": "\ud83d\n\\ud83d"}', r'{"a": "\ufffd\n\\ud83d"}'),
        (r'{"\ud83d": ["\ud83d\u00e9"]}', r'{"\ufffd": ["\ufffd\u00e9"]}'),
    ],
)
def test_half_a_pair_is_replaced_and_the_rest_kept(written: str, expected: str, size: int) -> None:
    stream, out = append_all(written, size)
    assert out + stream.complete() == expected
    json.loads(expected)["a" if "a" in expected[:4] else "\ufffd"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("", "{}"),
        ("{", "{}"),
        ('{"a', "{}"),
        ('{"a": ', "{}"),
        ('{"a": "U', '{"a": "U"}'),
        ('{"a": "U\\', '{"a": "U"}'),
        ('{"a": "U\\ud83d', '{"a": "U"}'),
        ('{"a": [1, {"b": "c"', '{"a": [1, {"b": "c"}]}'),
        ('{"a": [1, ', '{"a": [1]}'),
        ('{"a": true, "b', '{"a": true}'),
        ('{"a": true, "b" : ', '{"a": true}'),
        ('{"a": {"b": "c", "d":', '{"a": {"b": "c"}}'),
        ('"text', '"text"'),
        ('{"a": 1 }', '{"a": 1 }'),
    ],
)
def test_open_arguments_are_completed(written: str, expected: str, size: int) -> None:
    stream, out = append_all(written, size)
    assert expected.startswith(out)
    assert out + stream.complete() == expected
    assert stream.complete() == ""


CASES = [
    # a brace is missing; no JSON; a word that is none; the answer ends
    (HERMES.format('{"a": "Ulm"'), '{"a": "Ulm"}'),
    (HERMES.format('{"a": "Ulm", "b": NaN, "c": -Infinity}}'),
     '{"a": "Ulm", "b": null, "c": null}'),
    (HERMES.format('{"a": "Ulm", "b": nix, "c": 1}}'), '{"a": "Ulm"}'),
    (HERMES.format('{"a": ["Ulm", nix]}}'), '{"a": ["Ulm"]}'),
    (HERMES.format('{"a": 1e999, "b": 2}}'), f'{{"a": {LARGEST_FLOAT}, "b": 2}}'),
    ('<tool_call>\n{"name": "f", "arguments": {"a": "Ul', '{"a": "Ul"}'),
    ('<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "\\ud83', '{"a": 1, "b": ""}'),
]  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("text", "arguments"), CASES)
def test_what_a_model_breaks_is_json(text: str, arguments: str, size: int) -> None:
    parser = make_answer_parser(load_chat_syntax("hermes"), ["f"])
    pushed = [p for at in range(0, len(text), size) for p in parser.push(text[at : at + size])]
    answer = collect_answer([*pushed, *parser.flush()])
    assert [each.arguments for each in answer.calls] == [arguments]
    assert answer.content == ""


@pytest.mark.parametrize("size", SIZES)
def test_a_broken_call_is_completed_before_what_follows(size: int) -> None:
    """Also if a limit cuts off what follows: the call was ended by the model."""
    broken = HERMES.format('{"a": "Ulm"')
    for rest, cut in (("\nDone.", False), (f"\n{HERMES.format('{}}')}", False), ("\nDo", True)):
        parser = make_answer_parser(load_chat_syntax("hermes"), ["f"])
        text = broken + rest
        pieces = [p for at in range(0, len(text), size) for p in parser.push(text[at : at + size])]
        first = [each for each in pieces if isinstance(each, ToolCallDelta) and not each.index]
        assert "".join(each.arguments for each in first) == '{"a": "Ulm"}'
        assert len(collect_answer([*pieces, *parser.flush(cut)]).calls) == 1 + ("tool" in rest)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("written", "prefix"),
    [('{"a": "Ul', '{"a": "Ul'), ('{"a": 1, "b": ', '{"a": 1, "b": '), ('{"a": [1', '{"a": [1')],
)
def test_what_a_limit_cut_off_stays_a_prefix(written: str, prefix: str, size: int) -> None:
    text = f'<tool_call>\n{{"name": "f", "arguments": {written}'
    parser = make_answer_parser(load_chat_syntax("hermes"), ["f"])
    pushed = [p for at in range(0, len(text), size) for p in parser.push(text[at : at + size])]
    answer = collect_answer([*pushed, *parser.flush(cut=True)])
    assert [each.arguments for each in answer.calls] == [prefix]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize("word", ["NaN", "Infinity"])
def test_a_word_without_quotes_is_no_null(name: str, word: str) -> None:
    """Where a format writes no quotes, a value of another type is a string."""
    text = {
        "qwen3_coder": f"<tool_call>\n<function=f>\n<parameter=a>\n{word}\n</parameter>\n"
        "</function>\n</tool_call>",
        "glm45": f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{word}</arg_value>\n</tool_call>",
    }[name]
    for declared in ({}, {"type": "number"}, {"type": ["string", "null"]}, {"type": "null"}):
        tools = {"f": {"type": "object", "properties": {"a": declared}}}
        parser = make_answer_parser(load_chat_syntax(name), tools)
        (call,) = collect_answer([*parser.push(text), *parser.flush()]).calls
        assert json.loads(call.arguments) == {"a": word}
