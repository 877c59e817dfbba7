from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.core.errors import RequestError
from modelmill.text.stop_matcher import StopMatcher
from tests.hypothesis_examples import examples

LETTERS = st.text(alphabet="ab#", max_size=30)
STOPS = st.lists(st.text(alphabet="ab#", min_size=1, max_size=5), max_size=4)


def plain(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule said plainly: the first complete match, of several the longest; text before it."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(deadline=None, max_examples=examples(300, 100))
@given(LETTERS, STOPS, st.data())
def test_any_cut_gives_the_plain_answer(text, stops, draw):
    matcher = StopMatcher(stops)
    out, at, stopped, matched = "", 0, False, None
    while at < len(text) and not stopped:
        size = draw.draw(st.integers(1, len(text) - at))
        emit, stopped, matched = matcher.push(text[at : at + size])
        out += emit
        at += size
        if not stopped:
            pending = text[len(out) : at]
            assert text[:at] == out + pending
            # no part of a stop string is returned, no more is held back than needed
            longest = max(
                (n for s in stops for n in range(len(s)) if text[:at].endswith(s[:n])), default=0
            )
            assert len(pending) == longest
    assert (out + matcher.flush(), matched) == plain(text, stops)


def test_the_minigpt4_stop_arrives_in_two_tokens():
    matcher = StopMatcher(["###"])
    assert matcher.push("Yes.##") == ("Yes.", False, None)
    assert matcher.push(" no") == ("## no", False, None)
    assert matcher.push("#") == ("", False, None)
    assert matcher.push("##Human:") == ("", True, "###")
    assert matcher.push("more") == ("", True, "###")
    assert matcher.flush() == ""


def test_one_stop_inside_another_and_one_the_end_of_another():
    assert StopMatcher(["abcd", "bc"]).push("xabcd") == ("xa", True, "bc")
    assert StopMatcher(["cd", "abcd"]).push("xabcd") == ("x", True, "abcd")
    assert StopMatcher([]).push("anything") == ("anything", False, None)


@pytest.mark.parametrize("stops", [[""], ["a", ""], "abc", [1]])
def test_a_stop_must_be_a_text(stops):
    with pytest.raises(RequestError, match="stop"):
        StopMatcher(stops)


def test_a_megabyte_of_near_misses_is_linear():
    matcher = StopMatcher(["a" * 1000 + "b", "a" * 500 + "c"])
    start = time.process_time()
    for _ in range(1000):
        assert not matcher.push("a" * 1000)[1]
    assert time.process_time() - start < 5
