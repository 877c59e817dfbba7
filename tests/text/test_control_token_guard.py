from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.core.errors import RequestError
from modelmill.text.control_token_guard import (
    ControlTokenGuard,
    find_unused_mark_char,
    iter_strings,
    remove_guard_chars,
)
from modelmill.text.trie_regex import trie_regex
from tests.hypothesis_examples import examples

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "[X]", "X]Y")
MARK = "\ue000"
PARTS = st.sampled_from(
    [
        *SPECIAL,
        "<|im_",
        "start|>",
        "<",
        ">",
        "s",
        "|>",
        "[",
        "X",
        " ",
        "\n",
        "é",
        "/s>",
        "<|IM_END|>",
    ]
)
TEXTS = st.lists(PARTS, max_size=8).map("".join) | st.text(max_size=10)


@settings(deadline=None, max_examples=examples(300, 100))
@given(st.lists(TEXTS, max_size=4))
def test_no_joining_of_marked_texts_spells_a_control_token(texts):
    marked = ControlTokenGuard(SPECIAL).insert_guard_chars(texts, MARK)
    for change in (str, str.strip, str.lower, str.upper):
        joined = "".join(map(change, marked))
        # text that has no tail or head of a token between two others is all a template could add
        # for them
        assert not any(special in joined or special.lower() in joined for special in SPECIAL)
    assert [remove_guard_chars(text, MARK) for text in marked] == texts


@settings(deadline=None)
@given(st.lists(TEXTS, max_size=4))
def test_texts_without_any_piece_of_a_token_are_left_alone(texts):
    plain = [text.translate({ord(char): "-" for char in "<>[]|XxYy/"}) for text in texts]
    plain = [text for text in plain if not re.search("[sY]", text)]
    assert ControlTokenGuard(SPECIAL).insert_guard_chars(plain, MARK) == plain


def test_data_keeps_its_shape():
    data = {"<s>": [1, None, True, 2.5, ("a", "<s>")], "b": {"c": "d"}}
    assert ControlTokenGuard(SPECIAL).insert_guard_chars(data, MARK) == {
        f"<{MARK}s>": [1, None, True, 2.5, ["a", f"<{MARK}s>"]],
        "b": {"c": "d"},
    }
    assert set(iter_strings(data)) == {"<s>", "a", "b", "c", "d"}
    assert ControlTokenGuard([]).insert_guard_chars(data, MARK)["b"] == {"c": "d"}


def test_the_mark_is_free():
    assert find_unused_mark_char(["\ue000", r"\uE001"]) == "\ue002"
    assert remove_guard_chars(r"a\ue002b", "\ue002") == "ab"
    with pytest.raises(RequestError, match="private"):
        find_unused_mark_char(["".join(map(chr, range(0xE000, 0xF900)))])


@settings(deadline=None, max_examples=examples(200, 60))
@given(
    st.sets(st.text(alphabet="ab<|", min_size=1, max_size=5), min_size=1, max_size=8),
    st.text(alphabet="ab<|", max_size=20),
)
def test_alternation_finds_the_longest_at_the_first_place(texts, text):
    match = re.search(trie_regex(texts), text)
    places = [
        (at, -len(each)) for each in texts for at in range(len(text)) if text.startswith(each, at)
    ]
    if not places:
        assert match is None
    else:
        at, size = min(places)
        assert match is not None
        assert (match.start(), match.end()) == (at, at - size)


def test_many_tokens_and_a_megabyte_take_no_time():
    guard = ControlTokenGuard([f"<|reserved_special_token_{number}|>" for number in range(256)])
    start = time.process_time()
    for bomb in ("<|" * 500_000, "<" * 1_000_000, "<|reserved_special_token_1" * 40_000):
        guard.insert_guard_chars(bomb, MARK)
    assert time.process_time() - start < 5
