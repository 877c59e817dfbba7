"""Real vocabularies, read once, and small made-up ones that need no shared data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelmill.text.chat_format_loader import TemplateChatFormat
from modelmill.text.tokenizer_loader import Tokenizer, load_tokenizer

REAL = ("gpt2", "qwen2.5", "qwen3", "llama", "qwen.tiktoken", "stories")


def files_of(shared: Path, name: str) -> dict[str, bytes]:
    """The tokenizer files of one real vocabulary, as a checkpoint hands them over."""
    if name == "stories":
        path = shared / "data/models/stories260K/pieces.json"
        return {path.name: path.read_bytes()}
    path = shared / "data/tokenizers" / name
    return {
        file.name: file.read_bytes()
        for file in ([path] if path.is_file() else sorted(path.iterdir()))
    }


@pytest.fixture(scope="session")
def real(shared: Path) -> Any:
    """name → Tokenizer, loaded at its first use."""
    loaded: dict[str, Tokenizer] = {}

    def load(name: str) -> Tokenizer:
        if name not in loaded:
            loaded[name] = load_tokenizer(files_of(shared, name))
        return loaded[name]

    return load


@pytest.fixture(scope="session")
def load_hf_tokenizer(shared: Path) -> Any:
    """name → the same vocabulary in transformers, the reference."""
    import transformers

    loaded: dict[str, Any] = {}

    def load(name: str) -> Any:
        if name not in loaded:
            loaded[name] = transformers.AutoTokenizer.from_pretrained(
                shared / "data/tokenizers" / name
            )
        return loaded[name]

    return load


def byte_tokens() -> list[str]:
    """The 256 byte characters of byte-level BPE, from tokenizers itself."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def small_hf(**changes: Any) -> dict[str, Any]:
    """A tiny byte-level tokenizer.json: 256 bytes, two merges, one special and one ordinary added
    token.
    """
    tokens = [*byte_tokens(), "he", "llo", "ll"]
    vocab = {text: id for id, text in enumerate(tokens)}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": 259, "content": "<|end|>", "special": True, **added},
            {"id": 260, "content": "<tool>", "special": False, **added},
            {"id": 261, "content": "<|fim|>", "special": False, **added},
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocab,
            "merges": ["h e", "l l", "ll o"],
        },
    }
    return spec | changes


def hf_files(spec: dict[str, Any] | None = None, **config: Any) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json as files."""
    files = {"tokenizer.json": json.dumps(spec if spec is not None else small_hf()).encode()}
    return files | ({"tokenizer_config.json": json.dumps(config).encode()} if config else {})


def spm_rows() -> list[tuple[str, float, int]]:
    """(text, score, type) of a tiny SentencePiece vocabulary with all byte pieces."""
    rows = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    rows += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    words = ["▁h", "el", "▁hel", "lo", "▁hello", "▁", "h", "e", "l", "o", "é"]
    return rows + [(word, -float(i), 1) for i, word in enumerate(words)]


def gguf_files(**metadata: Any) -> dict[str, bytes]:
    """gguf_vocab.json with full metadata names, as a GGUF file has them."""
    named = {
        key if key == "chat_template" else f"ggml.{key}": value for key, value in metadata.items()
    }
    return {
        "gguf_vocab.json": json.dumps({f"tokenizer.{key}": v for key, v in named.items()}).encode()
    }


def gguf_bpe(**changes: Any) -> dict[str, bytes]:
    """A tiny byte-level GGUF vocabulary."""
    tokens = [*byte_tokens(), "he", "ll", "llo", "<|end|>", "<tool>"]
    base = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [1] * 259 + [3, 4],
        "merges": ["h e", "l l", "ll o"],
        "bos_token_id": 259,
        "eos_token_id": 259,
        "add_bos_token": False,
    }
    return gguf_files(**(base | changes))


def gguf_spm(**changes: Any) -> dict[str, bytes]:
    """A tiny SentencePiece GGUF vocabulary."""
    texts, scores, types = zip(*spm_rows(), strict=True)
    base = {
        "model": "llama",
        "tokens": list(texts),
        "scores": list(scores),
        "token_type": list(types),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return gguf_files(**(base | changes))


def rendered(template: str, messages: list[dict[str, Any]]) -> str:
    """A conversation as a chat template renders it."""
    chat = TemplateChatFormat({"default": template}, load_tokenizer(hf_files()))
    try:
        return chat.render(messages)
    finally:
        chat.close()
