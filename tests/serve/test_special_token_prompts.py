"""Control tokens in prompts, and prompts that fill in the middle."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelmill.core.errors import RequestError
from modelmill.serve.special_token_prompts import encode_infill, encode_text, find_fim_tokens
from modelmill.text.tokenizer_loader import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def qwen(shared: Path) -> Tokenizer:
    folder = shared / "data/tokenizers/qwen2.5"
    return load_tokenizer({path.name: path.read_bytes() for path in folder.iterdir()})


def test_text_becomes_control_tokens_only_where_asked(qwen: Tokenizer) -> None:
    text = "<|im_start|>user\nHi<|im_end|>"
    start, end = qwen.special["<|im_start|>"], qwen.special["<|im_end|>"]
    parsed = encode_text(qwen, text, parse_special=True)
    assert (parsed[0], parsed[-1]) == (start, end)
    plain = encode_text(qwen, text, parse_special=False)
    assert not {start, end} & set(plain)
    assert qwen.decode(plain) == text


def test_the_order_of_the_marks(qwen: Tokenizer) -> None:
    prefix, suffix, middle = (
        qwen.special[f"<|fim_{name}|>"] for name in ("prefix", "suffix", "middle")
    )
    ids, marks = encode_infill(qwen, "def f(", "):\n    <|fim_middle|>")
    assert ids[0] == prefix
    assert ids[-1] == middle
    assert ids.count(middle) == 1  # text of the client is no mark
    assert qwen.decode(ids[1 : ids.index(suffix)]) == "def f("
    assert {prefix, suffix, middle} <= set(marks.ends)


def test_marks_of_vocabularies() -> None:
    codestral = find_fim_tokens({"[PREFIX]": 3, "[SUFFIX]": 4})
    assert codestral is not None
    assert codestral.middle is None
    starcoder = {"<fim_prefix>": 1, "<fim_suffix>": 2, "<fim_middle>": 3, "<file_sep>": 9}
    marks = find_fim_tokens(starcoder)
    assert marks is not None
    assert (marks.prefix, marks.suffix, marks.middle, marks.ends) == (1, 2, 3, (9, 1, 2, 3))
    assert find_fim_tokens({"<fim_prefix>": 1}) is None


def test_a_vocabulary_without_marks(shared: Path) -> None:
    folder = shared / "data/tokenizers/gpt2"
    gpt2 = load_tokenizer({path.name: path.read_bytes() for path in folder.iterdir()})
    with pytest.raises(RequestError, match="suffix is not supported by this model"):
        encode_infill(gpt2, "a", "b")
