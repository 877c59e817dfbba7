"""Requests that are handed in: the order of service, and what follows from it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelmill.core.errors import RequestError
from modelmill.core.types import Request
from modelmill.runtime.sequence import RopeFrequencyRule, Sequence
from tests.runtime import tiny

RULE = RopeFrequencyRule("fixed", lambda _: 0)


def test_handed_in_together_the_longest_answers_are_served_first() -> None:
    engine = tiny.make_engine(max_num_seqs=1)
    lengths = [3, 9, 5, 9]
    todo = [
        Request(id=str(i), prompt=(5, 6, 7 + i), params=tiny.params(max_tokens=n, ignore_eos=True))
        for i, n in enumerate(lengths)
    ]
    engine.add_all(todo)
    ended = [t.request_id for t in tiny.drain(engine) if t.finish_reason is not None]
    assert ended == ["1", "3", "2", "0"]


def test_what_is_drawn_does_not_depend_on_the_order_of_service() -> None:
    todo = [
        Request(
            id=str(i),
            prompt=(5, 6, 7),
            params=tiny.params(temperature=1.5, max_tokens=n, ignore_eos=True),
        )
        for i, n in enumerate((4, 12, 8))
    ]
    engine = tiny.make_engine(seed=3)
    engine.add_all(todo)
    together = tiny.output_ids(tiny.drain(engine))
    assert together == tiny.run(tiny.make_engine(seed=3), todo)
    # and what is added later goes on counting
    later = Request(id="later", prompt=(5, 6, 7), params=todo[0].params)
    engine.add(later)
    other = tiny.make_engine(seed=3)
    for request in (*todo, later):
        other.add(request)
    assert (
        tiny.output_ids(tiny.drain(engine))["later", 0]
        == tiny.output_ids(tiny.drain(other))["later", 0]
    )


def test_a_request_that_cannot_be_served_is_refused_among_others() -> None:
    engine = tiny.make_engine()
    good = Request(id="good", prompt=(5, 6), params=tiny.params(max_tokens=3))
    bad = Request(id="bad", prompt=(), params=tiny.params(max_tokens=2))
    with pytest.raises(RequestError):
        engine.add_all([good, bad])
    engine.abort("good")
    tiny.drain(engine)
    tiny.assert_idle(engine)


@pytest.mark.parametrize("wrong", [-1, tiny.VOCAB, 1 << 70])
def test_an_id_outside_the_vocabulary_is_refused_in_one_line(wrong: int) -> None:
    with pytest.raises(RequestError, match="token ids must be between 0 and") as caught:
        tiny.make_engine().add(Request(id="r", prompt=(5, wrong), params=tiny.params(max_tokens=2)))
    assert "\n" not in str(caught.value)


@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=9),
    st.lists(st.integers(0, 99), max_size=5),
    st.data(),
)
def test_a_sequence_writes_its_tokens_from_anywhere(
    prompt: list[int], answer: list[int], data: st.DataObject
) -> None:
    seq = Sequence(
        Request(id="r", prompt=tuple(prompt), params=tiny.params()), 0, 0, RULE, max_length=99
    )
    seq.tokens += answer
    tokens = prompt + answer
    start = data.draw(st.integers(0, len(tokens)))
    stop = data.draw(st.integers(start, len(tokens)))
    out = np.full(stop - start, -7)
    seq.write_ids(start, out)
    assert out.tolist() == tokens[start:stop]
