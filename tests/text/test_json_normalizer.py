"""What models write as a value becomes JSON, and is a prefix of JSON at every point."""

from __future__ import annotations

import ast
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.text.answer_renderer import json_to_gemma_syntax, json_to_python_literal
from modelmill.text.json_normalizer import (
    StreamingJsonNormalizer,
    normalize_json,
    split_json_object,
)
from tests.hypothesis_examples import examples
from tools.chat_formats.check_answers import is_json_prefix

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda part: st.lists(part, max_size=3)
    | st.dictionaries(st.text(max_size=5), part, max_size=3),
    max_leaves=5,
)  # fmt: skip


def convert(text: str, size: int, mark: str = "") -> tuple[str, StreamingJsonNormalizer]:
    """The JSON of a text that comes in pieces; every prefix is checked."""
    stream, buffer, out = StreamingJsonNormalizer(mark), "", ""
    for at in range(0, len(text), size):
        buffer += text[at : at + size]
        buffer = buffer[stream.feed(buffer, 0) :]
        out += stream.drain_json()
        assert is_json_prefix(out) or not out
        if stream.done or stream.failed:
            return out, stream
    stream.feed(buffer, 0, final=True)
    return out + stream.drain_json(), stream


@settings(deadline=None, max_examples=100)
@given(value=VALUES, size=st.integers(1, 7), indent=st.sampled_from([None, 1]), ascii=st.booleans())
def test_json_stays_as_it_is(value: object, size: int, indent: int | None, ascii: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    out, stream = convert(text, size)
    assert (out, stream.done) == (text, True)


@settings(deadline=None, max_examples=100)
@given(value=VALUES, size=st.integers(1, 7))
def test_a_python_literal_becomes_json(value: object, size: int) -> None:
    out, stream = convert(repr(value), size)
    assert stream.done
    assert json.loads(out) == ast.literal_eval(repr(value))


@settings(deadline=None, max_examples=examples(100, 40))
@given(
    value=st.dictionaries(
        st.from_regex("[a-z_]{1,4}", fullmatch=True),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text("ab<|\"'{},:\n", max_size=6),
            lambda part: st.lists(part, max_size=3),
        ),
        max_size=3,
    ),
    size=st.integers(1, 5),
)
def test_marked_strings_and_bare_keys_become_json(value: dict[str, object], size: int) -> None:
    text = json_to_gemma_syntax(json.dumps(value), '<|"|>')
    out, stream = convert(text, size, '<|"|>')
    if '<|"|>' not in json.dumps(value).replace("\\", ""):
        assert stream.done
        assert json.loads(out) == value


@settings(deadline=None, max_examples=100)
@given(text=st.text("{}[]\"':,\\ \n0-1.eE+tfnTrueNoalsx", max_size=30), size=st.integers(1, 5))
def test_any_text_gives_a_prefix_of_json_however_it_is_cut(text: str, size: int) -> None:
    out, _ = convert(text, size)
    assert out == convert(text, 100)[0]
    assert not out or is_json_prefix(out)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{'a': 'it\\'s \"x\"'}", '{"a": "it\'s \\"x\\""}'),
        ('{"a": "two\nlines"}', '{"a": "two\\nlines"}'),
        ('{"a": [1, 2, ], }', '{"a": [1, 2 ] }'),
        ('{"a": "\\x41\\q"}', '{"a": "\\u0041\\\\q"}'),
        ("[True, None, False]", "[true, null, false]"),
        ('{"a": 01}', None),
        ('{"a": }', None),
        ('{"a" 1}', None),
        ("{1: 2}", None),
        ("[1,,2]", None),
        ("[NaN, Infinity, -Infinity]", "[null, null, null]"),
        ("[nan]", None),
        ("-NaN", None),
        ("{} {}", None),
        ("", None),
    ],
)
def test_what_models_write(text: str, expected: str | None) -> None:
    assert normalize_json(text) == expected


def test_an_object_is_split_into_texts() -> None:
    assert split_json_object('{"a": 1.50, "b" :[1, {"c": "}"}], "é": "\\u00e9"}') == [
        ("a", "1.50"),
        ("b", '[1, {"c": "}"}]'),
        ("é", '"\\u00e9"'),
    ]
    assert split_json_object(" {} ") == []
    assert [
        split_json_object(text) for text in ("[]", "{", '{"a"}', '{"a": 1 "b": 2}', "{} x")
    ] == [None] * 5


def test_constants_become_python_outside_of_strings() -> None:
    assert json_to_python_literal('{"null": [true, false, null, "true"]}') == (
        '{"null": [True, False, None, "true"]}'
    )
