"""How text is cut by each tokenizer.ggml.pre.

The cuts were compared with llama.cpp's vectors of command-r, deepseek-llm, deepseek-coder, falcon,
mpt, refact and starcoder, and of the names that the llama.cpp at hand knows with its tokenizer on
3,000 random texts each (``python -m tools.pre_tokenizer_witness``).
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelmill.text.pre_tokenizers import PRE_TOKENIZERS

REPRESENTATIVES = sorted({each.cuts: name for name, each in PRE_TOKENIZERS.items()}.values())
"""A name for each sequence of cuts."""


def cut(pre: str, text: str) -> list[str]:
    """The pieces, spaces and line ends as they are."""
    pieces = [piece for piece, _ in PRE_TOKENIZERS[pre].build().pre_tokenize_str(text)]
    return [piece.replace("\u0120", " ").replace("\u010a", "\n") for piece in pieces]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["ab", " 1234", "  ", " x", "'s"]),
        ("olmo", ["ab", " 1234", "  ", " x", "'s"]),
        ("smollm", ["ab", " ", "1", "2", "3", "4", "  ", " x", "'s"]),
        ("command-r", ["ab", " ", "1", "2", "3", "4", "  ", " x", "'s"]),
        ("llama-bpe", ["ab", " ", "123", "4", "  ", " x", "'s"]),
        ("glm4", ["ab", " ", "123", "4", "  ", " x", "'s"]),
        ("jais-2", ["ab", " ", "123", "4", "  ", " x", "'s"]),
        ("qwen2", ["ab", " ", "1", "2", "3", "4", "  ", " x", "'s"]),
        ("qwen35", ["ab", " ", "1", "2", "3", "4", "  ", " x", "'s"]),
        ("ufakzeka", ["ab", " ", "1", "2", "3", "4", "  ", " x", "'s"]),
        ("seed-coder", ["ab", " ", "1", "2", "3", "4", "  ", " x", "'s"]),
        ("gpt-4o", ["ab", " ", "123", "4", "  ", " x's"]),
        ("kimi-k2", ["ab", " ", "123", "4", "  ", " x's"]),
        ("tekken", ["ab", " ", "1", "2", "3", "4", "  ", " x", "'s"]),
        ("tiny_aya", ["ab", " ", "1", "234", "  ", " x's"]),
        ("deepseek-v3", ["ab", " ", "123", "4", "  ", " x", "'s"]),
        ("deepseek-llm", ["ab", " ", "1234", "  ", " x", "'", "s"]),
        ("deepseek-coder", ["ab", " ", "1", "2", "3", "4", "  ", " x", "'", "s"]),
        ("falcon", ["ab", " ", "123", "4", "  ", " x", "'", "s"]),
        ("bloom", ["ab", " 1234", "  ", " x's"]),
        ("viking", ["ab", " ", "1", "2", "3", "4", "  ", " x's"]),
        ("superbpe", ["ab ", "1", "234", "   x's"]),
    ],
)
def test_text_is_cut_as_the_models_do(pre: str, pieces: list[str]) -> None:
    assert cut(pre, "ab 1234   x's") == pieces


@pytest.mark.parametrize("pre", REPRESENTATIVES)
@given(
    text=st.text(
        st.sampled_from("aB\u00e9\u0416\u4e2d\u306e\uac00\u0e34 1\u0663\n\r\t'sS./\U0001f999"),
        max_size=30,
    )
)
def test_no_text_is_lost(pre: str, text: str) -> None:
    pieces = PRE_TOKENIZERS[pre].build().pre_tokenize_str(text)
    spans = [span for _, span in pieces]
    assert "".join(text[first:last] for first, last in spans) == text


def test_words_begin_anew_at_capitals_where_the_model_says_so() -> None:
    """The regular expression of tiktoken's o200k_base; tekken's has no contractions."""
    assert cut("gpt-4o", "camelCase it's") == ["camel", "Case", " it's"]
    assert cut("tekken", "camelCase it's") == ["camel", "Case", " it", "'s"]
    assert cut("llama3", "camelCase it's") == ["camelCase", " it", "'s"]


def test_marks_belong_to_words_where_the_model_says_so() -> None:
    word = "\u0e01\u0e34\u0e48\u0e07"
    assert len(cut("qwen35", word)) == len(cut("deepseek-v3", word)) == 1
    assert len(cut("qwen2", word)) > 1


def test_han_characters_are_words_of_their_own_in_kimi() -> None:
    assert len(cut("kimi-k2", "abc\u4e2d\u6587def")) == 3
    assert len(cut("gpt-4o", "abc\u4e2d\u6587def")) == 1


def test_slashes_follow_punctuation_in_o200k_only() -> None:
    assert cut("gpt-4o", "a.//\n") == ["a", ".//\n"]
    assert cut("gpt-4o", "a.\n/") == ["a", ".\n/"]
    assert cut("llama3", "a.\n/") == ["a", ".\n", "/"]
