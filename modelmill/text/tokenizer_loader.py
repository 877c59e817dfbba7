"""Loads the tokenizer whose type follows from the files."""

from __future__ import annotations

import re
from collections.abc import Mapping

from modelmill.core.errors import TokenizerError
from modelmill.text.tokenizer_base import Tokenizer

__all__ = ["Tokenizer", "load_tokenizer"]


def load_tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
    """The tokenizer that these files describe (name → content).

    In this order: gguf_vocab.json, tekken.json, tokenizer.json, *.tiktoken, tiktoken.model,
    tokenizer.model (SentencePiece's or tiktoken's), vocab.json + merges.txt, pieces.json. Mistral's
    tekken.json comes before tokenizer.json, which was made from it, in some models with other cuts,
    unless tokenizer_config.json has control tokens that tekken.json does not have.

    Raises:
        TokenizerError: when none is there or the one there is broken; the message names the file.
    """
    # imported here, not above: a server with one kind of vocabulary need not load all libraries
    if "gguf_vocab.json" in files:
        from modelmill.text.gguf_vocab import load_gguf_tokenizer

        return load_gguf_tokenizer(files)
    if "tekken.json" in files:
        from modelmill.text.tekken_tokenizer import load_tekken_tokenizer

        return load_tekken_tokenizer(files)
    if "tokenizer.json" in files:
        from modelmill.text.hf_tokenizer import load_tokenizer_json

        return load_tokenizer_json(files)
    if (name := _find_tiktoken_file(files)) is not None:
        from modelmill.text.tiktoken_tokenizer import load_tiktoken_tokenizer

        return load_tiktoken_tokenizer(files, name)
    if "tokenizer.model" in files:
        from modelmill.text.sentencepiece_tokenizer import load_spm_tokenizer

        return load_spm_tokenizer(files)
    if "vocab.json" in files and "merges.txt" in files:
        from modelmill.text.hf_tokenizer import load_vocab_and_merges

        return load_vocab_and_merges(files)
    if "pieces.json" in files:
        from modelmill.text.sentencepiece_tokenizer import load_pieces_json_tokenizer

        return load_pieces_json_tokenizer(files)
    raise TokenizerError(
        "no tokenizer found: expected tokenizer.json, tekken.json, *.tiktoken, tiktoken.model, "
        "tokenizer.model, or vocab.json with merges.txt"
    )


def _find_tiktoken_file(files: Mapping[str, bytes]) -> str | None:
    """The name of the file in tiktoken's format; None if there is none."""
    for name in (*sorted(name for name in files if name.endswith(".tiktoken")), "tiktoken.model"):
        if name in files:
            return name
    # GLM-4's of before 2024-11: the first line is "IQ== 0"; SentencePiece's begins with a tag
    stored = files.get("tokenizer.model", b"")[:64]
    return "tokenizer.model" if re.match(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?\n", stored) else None
