"""Loads the tokenizer whose type follows from the files."""

from __future__ import annotations

from collections.abc import Mapping

from modelmill.core.errors import TokenizerError
from modelmill.text.tokenizer_base import Tokenizer

__all__ = ["Tokenizer", "load_tokenizer"]


def load_tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
    """The tokenizer that these files describe (name → content).

    In this order: gguf_vocab.json, tokenizer.json, *.tiktoken, tokenizer.model, vocab.json +
    merges.txt,
    pieces.json. Raises TokenizerError, naming the file, when none is there or the one there is
    broken.
    """
    # imported here, not above: a server with a tiktoken model need not load the other two libraries
    if "gguf_vocab.json" in files:
        from modelmill.text.gguf_vocab import load_gguf_tokenizer

        return load_gguf_tokenizer(files)
    if "tokenizer.json" in files:
        from modelmill.text.hf import load_tokenizer_json

        return load_tokenizer_json(files)
    if any(name.endswith(".tiktoken") for name in files):
        from modelmill.text.tiktoken_qwen import load_tiktoken_tokenizer

        return load_tiktoken_tokenizer(files)
    if "tokenizer.model" in files:
        from modelmill.text.spm import load_spm_tokenizer

        return load_spm_tokenizer(files)
    if "vocab.json" in files and "merges.txt" in files:
        from modelmill.text.hf import load_vocab_merges

        return load_vocab_merges(files)
    if "pieces.json" in files:
        from modelmill.text.spm import load_pieces

        return load_pieces(files)
    raise TokenizerError(
        "no tokenizer found: expected tokenizer.json, qwen.tiktoken, tokenizer.model, or "
        "vocab.json with merges.txt"
    )
