"""Events are written the same however much of them is written beforehand."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelmill.serve.shape import Envelope, dumped, event

TEXTS = st.text(st.characters(), max_size=12)  # halves of surrogate pairs among them
VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a machine may be busy
OBJECTS = st.dictionaries(TEXTS, VALUES | st.lists(VALUES, max_size=3), max_size=4)


@PATIENT
@given(head=OBJECTS, choice=OBJECTS, tail=OBJECTS)
def test_an_envelope_writes_what_the_whole_event_is(head: Any, choice: Any, tail: Any) -> None:
    head, tail = {f"head {key}": value for key, value in head.items()}, {f"tail {k}": v for k, v in tail.items()}
    head = {"id": "x", **head}
    assert Envelope(head, tail).around(choice) == event({**head, "choices": [choice], **tail})


@PATIENT
@given(OBJECTS)
def test_json_is_the_standard_librarys(value: Any) -> None:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    assert dumped(value) == text.encode("utf-8", "replace")
