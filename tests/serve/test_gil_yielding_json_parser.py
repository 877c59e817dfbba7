"""JSON read in pieces is what json.loads makes of it, and bounds are kept before any value is
made.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from modelmill.serve import gil_yielding_json_parser, json_scan
from modelmill.serve.gil_yielding_json_parser import JsonParseError, parse_json
from modelmill.serve.json_scan import JsonLimits

FREE = JsonLimits(max_values=1 << 30, max_growth=1 << 20, min_memory_bytes=1 << 30)
PLAIN: list[Any] = [
    1, -2, 0.5, 1e9, None, True, "", "a", "é\u1234😀\ud83d" * 3, 'q"\\\n\\"' * 4, "x" * 40, "\\" * 9,  # noqa: E501
    1234567890,
]  # fmt: skip
KEYS = ["a", "b", "", "kk" * 20, 'é"', "\ud800"]
MARKS = b'{}[],:"\\ 1e'


def random_json(rng: random.Random, depth: int = 0) -> Any:
    if depth > 4 or rng.random() < 0.5:
        return rng.choice(PLAIN)
    if rng.random() < 0.5:
        return [random_json(rng, depth + 1) for _ in range(rng.choice((0, 1, 2, 9)))]
    return {rng.choice(KEYS): random_json(rng, depth + 1) for _ in range(rng.choice((0, 1, 2, 7)))}


def damaged(rng: random.Random, data: bytes) -> bytes:
    """One byte is lost, comes, or becomes another."""
    at = rng.randrange(len(data))
    new = bytes([rng.choice(MARKS)])
    return data[:at] + rng.choice((b"", new, new + data[at : at + 1])) + data[at + 1 :]


def loaded(data: bytes) -> str:
    try:
        return repr(json.loads(data.decode("utf-8", "surrogatepass")))
    except ValueError:
        return "refused"


def parse_to_repr(data: bytes) -> str:
    try:
        return repr(parse_json(data, FREE))
    except JsonParseError:
        return "refused"


@pytest.mark.parametrize("seed", range(4))
def test_pieces_make_the_same_values(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """With pieces of a few bytes every cut there is happens: in characters, escapes, pairs of them,
    between values.
    """
    monkeypatch.setattr(gil_yielding_json_parser, "MAX_CHUNK_STRUCTURALS", 3)
    monkeypatch.setattr(gil_yielding_json_parser, "MAX_CHUNK_BYTES", 24)
    monkeypatch.setattr(json_scan, "SLICE_BYTES", 15)
    rng, refused = random.Random(seed), 0
    for _ in range(120):
        style = {"ensure_ascii": rng.random() < 0.5, "indent": rng.choice((None, 1))}
        data = json.dumps(random_json(rng), **style).encode("utf-8", "surrogatepass")
        if rng.random() < 0.5:
            data = damaged(rng, data)
        if any(
            len(run) > 20 for run in "".join(chr(b) if 45 <= b <= 57 else " " for b in data).split()
        ):
            continue  # a number that is longer than a piece is refused
        assert parse_to_repr(data) == loaded(data), data
        refused += parse_to_repr(data) == "refused"
    assert 12 < refused < 100


@pytest.mark.parametrize(
    ("data", "message", "field"),
    [
        (b'{"a":1,"prompt":[' + b"1," * 1000 + b"1]}", "has more than 500 values", "prompt"),
        (b'{"a":[' + b"[" * 300 + b"]" * 300 + b"]}", "is nested more than 256 deep", "a"),
        (b"[" * 300 + b"]" * 300, "is nested more than 256 deep", None),
        (
            b'{"a":[' + b"{}," * 200 + b"1]}",
            "has too many small lists, objects and strings for its size",
            "a",
        ),
        (b'{"' + b"k" * 200 + b'":[' + b"1," * 1000 + b"1]}", "has more than 500 values", None),
        (b'{"a":[1,2}', "is not JSON", None),
        (b'{"a":[1,2]', "is not JSON", None),
        (b'{"a":"x', "is not JSON", None),
        (b"]", "is not JSON", None),
        (b'{"a":"\xff"}', "is not JSON", None),
        (b"9" * 5000, "cannot be read as JSON", None),
        (b'["' + "é".encode() * (3 << 20) + b'"]', "has a string of more than 4194304 bytes", None),
    ],
    ids=range(12),
)
def test_bounds_name_the_field(data: bytes, message: str, field: str | None) -> None:
    with pytest.raises(JsonParseError) as caught:
        parse_json(data, JsonLimits(max_values=500, min_memory_bytes=16 << 10))
    assert (str(caught.value), caught.value.field) == (message, field)


def test_what_is_large_and_fine() -> None:
    ids = [i % 50257 for i in range(100_000)]
    texts = ["é\n" * 100_000, "QUJD" * 100_000]
    value = parse_json(
        json.dumps({"prompt": ids, "texts": texts, "deep": [[[ids[:9000]]]]}).encode()
    )
    assert value == {"prompt": ids, "texts": texts, "deep": [[[ids[:9000]]]]}
    assert parse_json(b"\xef\xbb\xbf" + b" " * 200_000 + b"[1 ,2 ]" + b" " * 200_000) == [1, 2]


def test_equal_integers_are_one_object() -> None:
    value = parse_json(json.dumps([257] * 50_000).encode())
    assert len({id(each) for each in value}) == 1
    mixed = parse_json(json.dumps([1, True, 1.0] * 9000).encode())
    assert [type(each) for each in mixed[:3]] == [int, bool, float]


PART = '{"type":"output_text","logprobs":%s,"text":"x"}'
ENTRY = '{"token":"a","logprob":-0.5,"bytes":[97]}'


@pytest.mark.parametrize("between", [",", " ,\n "])
@pytest.mark.parametrize("count", [3, 20_000])
def test_long_unused_lists_are_left_empty(count: int, between: str) -> None:
    part = PART % (" [" + between.join([ENTRY] * count) + "] ")
    text = (
        '{"input":[{"role":"user","content":"logprobs"},{"content":['
        + part
        + ',{"logprobs":[1]}]}],"logprobs":[1]}'
    )
    value, expected = parse_json(text.encode(), FREE, {"logprobs": 5}), json.loads(text)
    if count > 4096:
        expected["input"][1]["content"][0]["logprobs"] = []
    assert value == expected
    assert parse_json(text.encode(), FREE) == json.loads(text)
    assert parse_json(text.encode(), FREE, {"logprobs": 4}) == json.loads(text)


@pytest.mark.parametrize("wrong", ["[1 2]", "[1]]", "[{]}", "{", "tru", '"', "1,"])
def test_unused_parts_have_to_be_json(wrong: str) -> None:
    text = (
        '{"input":[{"content":['
        + PART % ("[" + ",".join([*[ENTRY] * 20_000, wrong, ENTRY]) + "]")
        + "]}]}"
    )
    with pytest.raises(JsonParseError, match="is not JSON"):
        parse_json(text.encode(), FREE, {"logprobs": 5})
