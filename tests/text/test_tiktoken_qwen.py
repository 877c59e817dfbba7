from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.core.errors import TokenizerError
from modelmill.text import tiktoken_qwen
from modelmill.text.tiktoken_qwen import normalize_nfc
from modelmill.text.tokenizer import load_tokenizer
from tests.hypothesis_examples import examples


@settings(deadline=None, max_examples=examples(100, 30))
@given(text=st.text(max_size=50) | st.text(alphabet="ab 1\n\t'sé中🦙e\u0301\u0323", max_size=50))
def test_same_ids_as_qwen2_whose_vocabulary_is_the_same(real, text):
    assert real("qwen.tiktoken").encode(text) == real("qwen2.5").encode(text)


def test_control_tokens_and_sizes(real):
    tokenizer = real("qwen.tiktoken")
    special = tokenizer.special
    assert (special["<|endoftext|>"], special["<|im_start|>"], special["<|im_end|>"]) == (
        151643,
        151644,
        151645,
    )
    assert (special["<|extra_0|>"], special["<|extra_204|>"], len(special)) == (151646, 151850, 208)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (
        151643,
        (151643,),
        151851,
    )
    tokenizer.check_ids_fit(151936)


@settings(deadline=None)
@given(st.text(max_size=40) | st.text(alphabet="ae\u0301\u0323\u0344각\u1100\u1161", max_size=40))
def test_composing_is_nfc(text):
    assert normalize_nfc(text) == unicodedata.normalize("NFC", text)


def test_long_runs_of_marks_are_composed_in_parts():
    text = "a" + "\u0301\u0323" * 600 + " e\u0301"
    assert len(normalize_nfc(text)) == len(text) - 2  # ạ and é
    assert normalize_nfc(text).endswith(" é")


def test_blank_runs_are_cut_only_where_the_library_gives_up(real, monkeypatch):
    tokenizer = real("qwen.tiktoken")
    text = "a" + " " * 5000 + "b" + "\n" * 4000
    ids = tokenizer.encode(text)
    assert ids == real("qwen2.5").encode(text)
    million = " " * 300_000 + "b"
    assert tokenizer.decode(tokenizer.encode(million)) == million
    assert tiktoken_qwen.MAX_BLANK_RUN >= 10_000


ALL = "".join(
    f"{__import__('base64').b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256)
)


def test_a_vocabulary_of_bytes_works():
    tokenizer = load_tokenizer({"x.tiktoken": ALL.encode()})
    assert tokenizer.encode("aé") == [97, 195, 169]
    assert tokenizer.special["<|endoftext|>"] == 256


@pytest.mark.parametrize(
    "data",
    [ALL + "IQ== 256\n", ALL + "aGU= 300\n", ALL + "aGU=\n", ALL + "!!!! 256\n", ALL[:50], "\n"],
)
def test_duplicates_gaps_and_truncation_are_refused(data):
    with pytest.raises(TokenizerError, match=r"x\.tiktoken"):
        load_tokenizer({"x.tiktoken": data.encode()})
