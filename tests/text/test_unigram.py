"""Unigram models of tokenizer.json, and what a model writes for characters it does not know."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers

from modelmill.core.errors import TokenizerError
from modelmill.text.tokenizer import load_tokenizer

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
    ],
)
def test_broken_vocabularies_are_one_line(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(TokenizerError, match=words) as error:
        load_tokenizer(files(spec))
    assert "\n" not in str(error.value)


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
