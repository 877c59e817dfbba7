"""What a tokenizer.json says, checked before the library believes it."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from modelmill.core.errors import TokenizerError
from modelmill.core.quoting import quote
from modelmill.text.sentencepiece_proto import MAX_NORMALIZED_GROWTH, max_charsmap_replacement_len
from modelmill.text.tokenizer_files import is_token_id


def check_tokenizer_json(spec: Mapping[str, Any]) -> None:
    """Check the model, the vocabulary, the added tokens, the normalizer and the pre-tokenizer.

    Raises:
        TokenizerError: if one of them is invalid.
    """
    model = spec.get("model")
    model_type = model.get("type", "BPE") if isinstance(model, dict) else None
    if model_type not in ("BPE", "Unigram"):
        raise TokenizerError(
            f"tokenizer.json: expected a BPE or Unigram model, not {quote(model_type, 40)}"
        )
    assert isinstance(model, dict)
    vocab = model.get("vocab") if model_type == "BPE" else _unigram_vocab(model)
    check_vocab(vocab, "tokenizer.json")
    assert isinstance(vocab, dict)
    by_id = {id: text for text, id in vocab.items()}
    growth = _max_text_growth(spec.get("normalizer")) * _max_text_growth(spec.get("pre_tokenizer"))
    if growth > MAX_NORMALIZED_GROWTH:
        raise TokenizerError(
            "tokenizer.json: its normalizer or pre-tokenizer makes texts many times longer; no "
            "known tokenizer does"
        )
    added = spec.get("added_tokens") or []
    if not isinstance(added, list):
        raise TokenizerError("tokenizer.json: added_tokens must be a list")
    for token in added:
        if (
            not isinstance(token, dict)
            or not is_token_id(token.get("id"))
            or not token.get("content")
        ):
            raise TokenizerError("tokenizer.json: every added token needs an id and a content")
        if by_id.setdefault(token["id"], token["content"]) != token["content"]:
            raise TokenizerError(f"tokenizer.json: two tokens share the id {token['id']}")
        if vocab.get(token["content"], token["id"]) != token["id"]:
            raise TokenizerError(f"tokenizer.json: {token['content']!r} has two ids")


def _unigram_vocab(model: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of a Unigram model's pieces, which are listed in their order with scores.

    Raises:
        TokenizerError: unless it is a list of different pieces, each with a number, and one of them
            is for characters that it does not know.
    """
    pieces = model.get("vocab")
    if not isinstance(pieces, list) or not all(
        isinstance(each, list)
        and len(each) == 2
        and isinstance(each[0], str)
        and isinstance(each[1], int | float)
        for each in pieces
    ):
        raise TokenizerError(
            "tokenizer.json: the vocabulary of a Unigram model must be a list of pieces and scores"
        )
    ids = {piece: id for id, (piece, _) in enumerate(pieces)}
    if len(ids) != len(pieces):
        raise TokenizerError("tokenizer.json: two pieces of the vocabulary are alike")
    if not is_token_id(model.get("unk_id")):
        raise TokenizerError(
            "tokenizer.json: a Unigram model needs an unk_id, the id of the piece for characters "
            "that it does not know"
        )
    return ids


def unknown_token_id(spec: Mapping[str, Any]) -> int | None:
    """Return the id that the model of a tokenizer.json writes for characters it does not know."""
    model = spec["model"]
    if model.get("type", "BPE") == "Unigram":
        id = model.get("unk_id")
    else:
        id = model["vocab"].get(model.get("unk_token"))
    return id if is_token_id(id) else None


def check_vocab(vocab: object, file: str) -> None:
    """Raises TokenizerError unless it maps tokens to different ids from 0."""
    if not isinstance(vocab, dict) or not vocab:
        raise TokenizerError(f"{file}: the vocabulary is missing or empty")
    if not all(is_token_id(id) for id in vocab.values()):
        raise TokenizerError(f"{file}: token ids must be integers from 0")
    if len(set(vocab.values())) != len(vocab):
        raise TokenizerError(f"{file}: two tokens share an id")


def _max_text_growth(step: object) -> int:
    """How many times longer a normalizer or a pre-tokenizer can make a text, at most."""
    if isinstance(step, list):
        total = 1
        for part in step:
            total = min(total * _max_text_growth(part), MAX_NORMALIZED_GROWTH + 1)
        return total
    if not isinstance(step, dict):
        return 1
    inner = _max_text_growth(step.get("normalizers")) * _max_text_growth(step.get("pretokenizers"))
    return max(_own_text_growth(step), 1) * inner


def _own_text_growth(step: Mapping[str, Any]) -> int:
    """How many times longer a step itself can make a text, without those inside it."""
    content, charsmap = step.get("content"), step.get("precompiled_charsmap")
    match step.get("type"):
        case "Replace" if isinstance(content, str):
            return len(content)
        case "ByteLevel":
            return 2  # bytes of a character, which another one takes for as many characters
        case "Precompiled" if isinstance(charsmap, str):
            return max_charsmap_replacement_len(_decode_base64_or_empty(charsmap))
    return 1


def _decode_base64_or_empty(text: str) -> bytes:
    """The bytes; none of what is no base64, which the library refuses."""
    try:
        return base64.b64decode(text)
    except ValueError:
        return b""
