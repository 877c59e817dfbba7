"""Unigram models of tokenizer.json, and what a model writes for characters it does not know."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import tokenizers

from modelmill.core.errors import TokenizerError
from modelmill.text.sentencepiece_proto import (
    UNKNOWN_PIECE,
    SpmModel,
    SpmPiece,
    parse_spm_model,
    serialize_spm_model,
)
from modelmill.text.tokenizer_loader import load_tokenizer

META = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
PIECES = ["<unk>", "</s>", "▁", "▁the", "▁mill", "m", "i", "l", "t", "h", "e", "▁water", "s"]
SPECIAL = [
    {"id": id, "content": text, "special": True, "normalized": False, "lstrip": False,
     "rstrip": False, "single_word": False}
    for id, text in ((0, "<unk>"), (1, "</s>"))
]  # fmt: skip
TEXTS = ("the watermill", " the  mills", "mill", "", "thé mill", "<unk>the</s>mill", "中文 mill")


def unigram(*, pieces: Any = None, byte_fallback: bool = False, **model: Any) -> dict[str, Any]:
    """A tokenizer.json of a Unigram model."""
    chosen = [*PIECES, *(f"<0x{byte:02X}>" for byte in range(256))] if byte_fallback else PIECES
    vocab = [[piece, -1.0 - 0.1 * place] for place, piece in enumerate(chosen)]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": SPECIAL,
        "normalizer": None, "pre_tokenizer": META, "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, META]},
        "model": {
            "type": "Unigram", "unk_id": 0, "vocab": vocab if pieces is None else pieces,
            "byte_fallback": byte_fallback, **model,
        },
    }  # fmt: skip


def files(spec: dict[str, Any]) -> dict[str, bytes]:
    return {"tokenizer.json": json.dumps(spec).encode()}


@pytest.mark.parametrize("byte_fallback", [False, True])
def test_ids_and_texts_are_those_of_the_library(byte_fallback: bool) -> None:
    spec = unigram(byte_fallback=byte_fallback)
    library = tokenizers.Tokenizer.from_str(json.dumps(spec))
    tokenizer = load_tokenizer(files(spec))
    for text in TEXTS:
        ids = library.encode(text).ids
        assert tokenizer.encode(text, special=True) == ids, text
        assert tokenizer.decode(ids, skip_special=False) == library.decode(
            ids, skip_special_tokens=False
        )


def test_an_unknown_character_is_the_unknown_token_and_its_name_is_text() -> None:
    """The model writes <unk> for é; a user who writes <unk> does not get the token."""
    tokenizer = load_tokenizer(files(unigram()))
    assert tokenizer.encode("thé").count(0) == 1
    spelled = tokenizer.encode("<unk>")
    assert spelled != [0]
    assert tokenizer.encode("<unk>", special=True) == [0]


def test_so_it_is_in_a_bpe_without_bytes() -> None:
    vocab = {"<unk>": 0, "</s>": 1, "▁": 2, "a": 3, "b": 4, "ab": 5}
    bpe = {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]], "unk_token": "<unk>"}
    spec = unigram() | {"model": bpe}
    library = tokenizers.Tokenizer.from_str(json.dumps(spec))
    assert load_tokenizer(files(spec)).encode("abé a") == library.encode("abé a").ids


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (unigram(pieces={"a": 0}), "must be a list of pieces and scores"),
        (unigram(pieces=[["a", "x"]]), "must be a list of pieces and scores"),
        (unigram(pieces=[["a", 0.0], ["a", 1.0]]), "two pieces of the vocabulary are alike"),
        (unigram() | {"model": {"type": "WordPiece", "vocab": {"a": 0}}}, "BPE or Unigram model"),
        (unigram(unk_id=None), "needs an unk_id"),
    ],
)
def test_broken_vocabularies_are_one_line(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(TokenizerError, match=words) as error:
        load_tokenizer(files(spec))
    assert "\n" not in str(error.value)


PREPEND: dict[str, Any] = {"type": "Prepend", "prepend": "▁"}
FRONTS: dict[str, dict[str, Any]] = {
    "Metaspace": {"pre_tokenizer": META},
    "nested": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [META]}},
    "Prepend": {"pre_tokenizer": None, "normalizer": PREPEND},
}


@pytest.mark.parametrize("front", FRONTS)
def test_a_long_text_of_names_of_control_tokens_is_split_at_once(front: str) -> None:
    """The model makes </s> of each; once that took as many nested calls, each with a copy."""
    pieces = [*PIECES, "<", "/", ">"]
    spec = unigram(pieces=[[piece, -1.0] for piece in pieces]) | FRONTS[front]
    tokenizer = load_tokenizer(files(spec))
    text = "</s>" * 3000
    ids = tokenizer.encode(text)
    assert "".join(pieces[id] for id in ids) == "▁" + text
    assert 1 not in ids


def normalized(*steps: dict[str, Any], key: str = "normalizer") -> dict[str, Any]:
    inner = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}[key]
    return unigram() | {key: {"type": "Sequence", inner: list(steps)}}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
# an empty trie, and a replacement of a thousand characters
CHARSMAP = {
    "type": "Precompiled",
    "precompiled_charsmap": base64.b64encode(bytes(4) + b"x" * 1000 + bytes(1)).decode(),
}


@pytest.mark.parametrize(
    "spec",
    [
        normalized(*[BYTES] * 20),
        normalized(*[BYTES] * 20, key="pre_tokenizer"),
        normalized({"type": "Sequence", "normalizers": [BYTES] * 4}, *[BYTES] * 4),
        normalized(CHARSMAP),
    ],
)
def test_a_file_that_makes_texts_many_times_longer_is_refused(spec: dict[str, Any]) -> None:
    with pytest.raises(TokenizerError, match="many times longer"):
        load_tokenizer(files(spec))


def bytes_field(number: int, data: bytes) -> bytes:
    """A protocol buffer's field of 128 to 16383 bytes."""
    return bytes([number << 3 | 2, len(data) & 127 | 128, len(data) >> 7]) + data


def test_so_is_a_sentencepiece_model() -> None:
    charsmap = base64.b64decode(CHARSMAP["precompiled_charsmap"])
    normalizer = bytes_field(3, bytes_field(2, charsmap))
    model = serialize_spm_model(
        SpmModel([SpmPiece("<unk>", 0.0, UNKNOWN_PIECE), SpmPiece("a", 0.0)])
    )
    assert parse_spm_model(model, "tokenizer.model").pieces[1].text == "a"
    with pytest.raises(TokenizerError, match="1000 times longer"):
        parse_spm_model(model + normalizer, "tokenizer.model")


def test_affixes_are_seen_where_a_letter_is_dropped() -> None:
    post = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "</s>", "type_id": 0}},
                   {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
    }  # fmt: skip
    drop = {"type": "Replace", "pattern": {"String": "x"}, "content": ""}
    bare = {"pre_tokenizer": None, "post_processor": post, "normalizer": drop}
    tokenizer = load_tokenizer(files(unigram() | bare))
    assert tokenizer.encode("m") == [1, 5]
