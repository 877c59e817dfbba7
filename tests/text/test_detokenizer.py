from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.text.detokenizer import REPLACEMENT_CHAR, Detokenizer, IncrementalUtf8Decoder
from modelmill.text.tokenizer_loader import load_tokenizer
from tests.hypothesis_examples import examples
from tests.text.conftest import REAL, gguf_bpe, gguf_spm, hf_files

SMALL = {"hf": hf_files(), "gguf-bpe": gguf_bpe(), "gguf-spm": gguf_spm()}


def streamed(tokenizer, ids, skip_special):
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
    return "".join(map(detokenizer.push, ids)) + detokenizer.flush()


def check_streamed(tokenizer, ids, skip_special):
    """What is pushed one by one is what the ids decode to together."""
    expected = tokenizer.decode(ids, skip_special=skip_special)
    assert streamed(tokenizer, ids, skip_special) == expected


@pytest.mark.parametrize("model_name", SMALL)
@settings(deadline=None)
@given(data=st.data(), skip_special=st.booleans())
def test_small_vocabularies_stream_what_they_decode(model_name, data, skip_special):
    tokenizer = load_tokenizer(SMALL[model_name])
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=12))
    check_streamed(tokenizer, ids, skip_special)


def streams_what_it_decodes(tokenizer, data, skip_special):
    one = st.integers(0, tokenizer.vocab_size - 1) | st.integers(0, 260)
    ids = data.draw(st.lists(one, max_size=12))
    check_streamed(tokenizer, ids, skip_special)


def adds_what_follows(tokenizer, data, skip_special):
    """What follows a text is what it adds to it."""
    before = tokenizer.encode("word", bos=False)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special, continues_prompt=True)
    added = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    assert "word" + added == tokenizer.decode([*before, *ids], skip_special=skip_special)


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("check", [streams_what_it_decodes, adds_what_follows])
@settings(deadline=None, max_examples=examples(25, 8))
@given(data=st.data(), skip_special=st.booleans())
def test_real_vocabularies(real, name, check, data, skip_special):
    check(real(name), data, skip_special)


@pytest.mark.parametrize("model_name", SMALL)
@settings(deadline=None)
@given(data=st.data(), skip_special=st.booleans(), follows=st.booleans())
def test_ids_before_and_behind_are_decoded_together(model_name, data, skip_special, follows):
    """A prompt of ids may end inside a character: it is the first of what follows.

    Its control tokens never show.
    """
    tokenizer = load_tokenizer(SMALL[model_name])
    ids = st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=8)
    prompt, answer = data.draw(ids), data.draw(ids)
    # written out, control tokens of the answer are its words
    plain = [id for id in prompt if not tokenizer.is_skipped_in_decode(id)]
    follows = follows or any(map(tokenizer.token_bytes, plain))
    before = Detokenizer(tokenizer, skip_special=skip_special, continues_prompt=follows)
    text = "".join(map(before.push_prompt_token, prompt))
    for detokenizer in (before.fork(), before):
        streamed = text + "".join(map(detokenizer.push, answer)) + detokenizer.flush()
        first = (
            []
            if any(map(tokenizer.token_bytes, plain)) or not follows
            else tokenizer.encode("h", bos=False)
        )
        full_text = tokenizer.decode([*first, *plain, *answer], skip_special=skip_special)
        assert streamed == full_text[len(tokenizer.decode(first)) :]


@pytest.mark.parametrize("name", REAL)
@settings(deadline=None, max_examples=25)
@given(text=st.text(max_size=40))
def test_text_comes_back_and_only_ever_grows(real, name, text):
    tokenizer = real(name)
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer)
    streamed = ""
    for id in ids:
        streamed += detokenizer.push(id)
        assert "\ufffd" not in streamed or "\ufffd" in text
    streamed += detokenizer.flush()
    assert streamed == tokenizer.decode(ids)


def test_an_emoji_in_four_tokens_comes_at_once(real):
    tokenizer = real("llama")
    ids = tokenizer.encode("a🦙", bos=False)
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(id) for id in ids] == ["a", "", "", "", "🦙"]


def test_a_cut_emoji_is_replaced_at_the_end(real):
    tokenizer = real("llama")
    ids = tokenizer.encode("🦙", bos=False)[:-1]
    detokenizer = Detokenizer(tokenizer)
    assert "".join(map(detokenizer.push, ids)) == ""
    assert detokenizer.flush() == "\ufffd" * 3


# bytes from the places where UTF-8 decoders differ: lead bytes, continuation bytes, overlongs,
# surrogates
NASTY = st.lists(
    st.sampled_from(
        [0x41, 0x80, 0xBF, 0xC0, 0xC3, 0xE0, 0xE2, 0x82, 0xAC, 0xED, 0xA0, 0xF0, 0x9F, 0xF4]
    )
)


@settings(deadline=None)
@given(NASTY.map(bytes) | st.binary(), st.data())
def test_any_cut_gives_what_python_gives(data, draw):
    stream = IncrementalUtf8Decoder()
    text, at = "", 0
    while at < len(data):
        size = draw.draw(st.integers(1, len(data) - at))
        text += stream.push(data[at : at + size])
        at += size
    assert text + stream.flush() == data.decode("utf-8", errors="replace")


@settings(deadline=None)
@given(NASTY.map(bytes) | st.binary())
def test_each_byte_counts_every_broken_byte(data):
    stream = IncrementalUtf8Decoder(each_byte=True)
    text = "".join(stream.push(bytes([byte])) for byte in data) + stream.flush()
    valid_text = text.replace(REPLACEMENT_CHAR, "")
    genuine = data.decode("utf-8", errors="ignore").count(REPLACEMENT_CHAR)
    assert valid_text == data.decode("utf-8", errors="ignore").replace(REPLACEMENT_CHAR, "")
    assert text.count(REPLACEMENT_CHAR) - genuine == len(data) - len(
        data.decode("utf-8", errors="ignore").encode()
    )


def test_never_holds_back_a_finished_character():
    stream = IncrementalUtf8Decoder()
    assert [stream.push(bytes([byte])) for byte in "é🦙a".encode()] == [
        "",
        "é",
        "",
        "",
        "",
        "🦙",
        "a",
    ]
