from __future__ import annotations

import json
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.core.errors import TokenizerError
from modelmill.text.sentencepiece_proto import (
    SpmModel,
    SpmPiece,
    disable_dummy_prefix,
    parse_spm_model,
    serialize_spm_model,
)
from modelmill.text.tokenizer_loader import load_tokenizer
from tests.text.conftest import spm_rows


@pytest.fixture(scope="module")
def library(shared):
    return sentencepiece.SentencePieceProcessor(
        model_file=str(shared / "data/tokenizers/llama/tokenizer.model")
    )


@settings(deadline=None, max_examples=100)
@given(ids=st.lists(st.integers(0, 31999) | st.integers(3, 258), max_size=10))
def test_decodes_as_the_library_does(real, library, ids):
    # the library writes " ⁇ " for <unk>, which we treat as the control token it is
    ids = [id for id in ids if id != 0]
    assert real("llama").decode(ids) == library.decode(ids)


@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=40))
def test_encodes_as_the_library_does(real, library, text):
    assert real("llama").encode(text, bos=False) == library.encode(text)
    assert real("llama").encode(text) == [1, *library.encode(text)]


def test_every_stretch_gets_the_dummy_space_unless_the_config_says_otherwise(shared):
    files = {"tokenizer.model": (shared / "data/tokenizers/llama/tokenizer.model").read_bytes()}
    legacy = load_tokenizer(files)
    assert legacy.encode("a</s>a", special=True) == [1, 263, 2, 263]
    modern = load_tokenizer(files | {"tokenizer_config.json": b'{"legacy": false}'})
    assert modern.encode("a</s>a", special=True) == [1, 263, 2, 29874]


def test_added_tokens(shared):
    files = {
        "tokenizer.model": (shared / "data/tokenizers/llama/tokenizer.model").read_bytes(),
        "added_tokens.json": b'{"[PAD]": 32000}',
        "tokenizer_config.json": json.dumps({"pad_token": "[PAD]", "add_eos_token": True}).encode(),
    }
    tokenizer = load_tokenizer(files)
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.token_bytes(32000)) == (
        32001,
        32000,
        b"[PAD]",
    )
    assert tokenizer.encode("[PAD]", special=True) == [1, 32000, 2]
    assert 32000 not in tokenizer.encode("[PAD]")
    assert tokenizer.decode([1, 263, 32000]) == "a"
    with pytest.raises(TokenizerError, match="share the id 5"):
        load_tokenizer(files | {"added_tokens.json": b'{"[PAD]": 5}'})
    with pytest.raises(TokenizerError, match=r"added_tokens\.json"):
        load_tokenizer(files | {"added_tokens.json": b'{"[PAD]": "x"}'})


def test_pieces_json_is_the_llama2c_vocabulary(real):
    """Ids of the text that stories260K writes from BOS alone; golden split by hand from its
    scores.
    """
    tokenizer = real("stories")
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (512, 1, (2,))
    text = "Once upon a time, there was a little girl named Lily."
    ids = tokenizer.encode(text)
    assert ids[0] == 1
    assert [tokenizer.token_bytes(id) for id in ids[1:4]] == [b" Once", b" upon", b" a"] or len(
        ids
    ) > 4
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes(259) == b" t"
    assert tokenizer.encode("🦙", bos=False)[-4:] == [3 + byte for byte in "🦙".encode()]


def small() -> SpmModel:
    return SpmModel([SpmPiece(*row) for row in spm_rows()])


def test_a_written_model_reads_back_and_loads():
    data = serialize_spm_model(small())
    assert parse_spm_model(data, "x") == small()
    assert not parse_spm_model(disable_dummy_prefix(data), "x").dummy_prefix
    processor = sentencepiece.SentencePieceProcessor(model_proto=data)
    assert processor.encode("hello", out_type=str) == ["▁hello"]
    bare = sentencepiece.SentencePieceProcessor(model_proto=disable_dummy_prefix(data))
    assert bare.encode("hello", out_type=str) == ["h", "el", "lo"]


def test_the_real_model_reads_as_the_library_reads_it(shared, library):
    data = (shared / "data/tokenizers/llama/tokenizer.model").read_bytes()
    model = parse_spm_model(data, "tokenizer.model")
    assert [piece.text for piece in model.pieces] == [
        library.id_to_piece(id) for id in range(32000)
    ]
    assert (model.unk_id, model.bos_id, model.eos_id, model.pad_id) == (0, 1, 2, -1)
    rebuilt = sentencepiece.SentencePieceProcessor(model_proto=serialize_spm_model(model))
    for text in ("Hello  world é🦙", " this is\n\n", "w048 7tuijk"):
        assert rebuilt.encode(text) == library.encode(text)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_damaged_model_is_refused_or_works(data):
    good = bytearray(serialize_spm_model(small()))
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(good)))
    try:
        tokenizer = load_tokenizer({"tokenizer.model": bytes(good[:cut])})
    except TokenizerError:
        return
    tokenizer.encode("hello")


def rows(*more, drop=0):
    pieces = [{"piece": text.replace("▁", " "), "score": score} for text, score, _ in spm_rows()]
    return {"pieces.json": json.dumps([*pieces[drop:], *more]).encode()}


def test_pieces_json_errors():
    assert load_tokenizer(rows()).encode("hello", bos=False) == [263]
    with pytest.raises(TokenizerError, match="the same"):
        load_tokenizer(rows({"piece": " h", "score": 0}))
    with pytest.raises(TokenizerError, match="empty"):
        load_tokenizer(rows({"piece": "", "score": 0}))
    with pytest.raises(TokenizerError, match="finite"):
        load_tokenizer({"pieces.json": rows()["pieces.json"].replace(b"-3.0", b"NaN")})
    with pytest.raises(TokenizerError):
        load_tokenizer(rows(drop=3))


def test_an_added_token_takes_the_place_of_an_unused_piece(shared: Path) -> None:
    """InternLM2's <|im_start|> is the id of a piece that the tokenizer.model calls unused."""
    model = (shared / "data/tokenizers/llama/tokenizer.model").read_bytes()
    plain = load_tokenizer({"tokenizer.model": model})
    piece = plain.encode("中", bos=False)[-1]
    added = {str(piece): {"content": "<|im_start|>", "special": True}}
    config = json.dumps({"added_tokens_decoder": added}).encode()
    tokenizer = load_tokenizer({"tokenizer.model": model, "tokenizer_config.json": config})
    assert tokenizer.special["<|im_start|>"] == piece
    assert tokenizer.encode("<|im_start|>a", bos=False, special=True)[0] == piece
    assert tokenizer.decode([piece], skip_special=False).strip() == "<|im_start|>"
    # the piece's own text is not the control token, and is written in bytes
    ids = tokenizer.encode("中", bos=False)
    assert piece not in ids
    assert tokenizer.decode(ids).strip() == "中"
    assert tokenizer.vocab_size == plain.vocab_size
