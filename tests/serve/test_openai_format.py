"""Events are written the same however much of them is written beforehand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelmill.serve import gil_yielding_json_serializer
from modelmill.serve.gil_yielding_json_serializer import EncodedJson
from modelmill.serve.openai_format import ChunkTemplate, dump_json, sse_event

TEXTS = st.text(st.characters(), max_size=12)  # halves of surrogate pairs among them
VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS
)
# a machine may be busy
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
OBJECTS = st.dictionaries(TEXTS, VALUES | st.lists(VALUES, max_size=3), max_size=4)


@PATIENT
@given(head=OBJECTS, choice=OBJECTS, tail=OBJECTS)
def test_an_envelope_writes_what_the_whole_event_is(head: Any, choice: Any, tail: Any) -> None:
    head, tail = (
        {f"head {key}": value for key, value in head.items()},
        {f"tail {k}": v for k, v in tail.items()},
    )
    head = {"id": "x", **head}
    assert ChunkTemplate(head, tail).render_chunk(choice) == sse_event(
        {**head, "choices": [choice], **tail}
    )


@PATIENT
@given(OBJECTS)
def test_json_is_the_standard_librarys(value: Any) -> None:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    assert dump_json(value) == text.encode("utf-8", "replace")


NESTED = st.recursive(
    VALUES, lambda some: st.lists(some, max_size=5) | st.dictionaries(TEXTS, some, max_size=5)
)


@PATIENT
@given(value=NESTED, piece=st.integers(2, 12))
def test_what_is_written_in_pieces_is_the_same(value: Any, piece: int) -> None:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gil_yielding_json_serializer, "MAX_CHUNK_VALUES", piece)
        assert dump_json(value) == text.encode("utf-8", "replace")


@PATIENT
@given(values=st.lists(NESTED, max_size=6))
def test_what_is_written_already_is_left_as_it_is(values: list[Any]) -> None:
    value = {"a": values, "b": [1, *values]}
    written = [EncodedJson(dump_json(each)) for each in values]
    assert dump_json({"a": written, "b": [1, *written]}) == dump_json(value)


def test_no_piece_is_large() -> None:
    """Other threads have their turn between two pieces, and only there."""
    row = {"top": {str(i): -0.5 * i for i in range(21)}, "bytes": [1, 2, 3]}
    value = {"choices": [{"logprobs": [row] * 3000, "ids": list(range(50_000))}], "usage": {"n": 1}}
    sizes: list[int] = []

    def write(part: Any) -> bytes:
        sizes.append(count_values(part))
        return at_once(part)

    at_once = gil_yielding_json_serializer.dump_small_json
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gil_yielding_json_serializer, "dump_small_json", write)
        assert json.loads(dump_json(value)) == value
    assert max(sizes) <= gil_yielding_json_serializer.MAX_CHUNK_VALUES
    assert len(sizes) < 60


def count_values(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(count_values, inner))
