from __future__ import annotations

import base64
import json
import re
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.core.errors import TokenizerError
from modelmill.text import tiktoken_tokenizer
from modelmill.text.tiktoken_tokenizer import normalize_nfc
from modelmill.text.tokenizer_loader import load_tokenizer
from tests.hypothesis_examples import examples


@settings(deadline=None, max_examples=examples(100, 30))
@given(text=st.text(max_size=50) | st.text(alphabet="ab 1\n\t'sé中🦙e\u0301\u0323", max_size=50))
def test_same_ids_as_qwen2_whose_vocabulary_is_the_same(real, text):
    assert real("qwen.tiktoken").encode(text) == real("qwen2.5").encode(text)


def test_control_tokens_and_sizes(real):
    tokenizer = real("qwen.tiktoken")
    special = tokenizer.special
    assert (special["<|endoftext|>"], special["<|im_start|>"], special["<|im_end|>"]) == (
        151643,
        151644,
        151645,
    )
    assert (special["<|extra_0|>"], special["<|extra_204|>"], len(special)) == (151646, 151850, 208)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (
        151643,
        (151643,),
        151851,
    )
    tokenizer.check_ids_fit_embedding(151936)


@settings(deadline=None)
@given(st.text(max_size=40) | st.text(alphabet="ae\u0301\u0323\u0344각\u1100\u1161", max_size=40))
def test_composing_is_nfc(text):
    assert normalize_nfc(text) == unicodedata.normalize("NFC", text)


def test_long_runs_of_marks_are_composed_in_parts():
    text = "a" + "\u0301\u0323" * 600 + " e\u0301"
    assert len(normalize_nfc(text)) == len(text) - 2  # ạ and é
    assert normalize_nfc(text).endswith(" é")


def test_blank_runs_are_cut_only_where_the_library_gives_up(real, monkeypatch):
    tokenizer = real("qwen.tiktoken")
    text = "a" + " " * 5000 + "b" + "\n" * 4000
    ids = tokenizer.encode(text)
    assert ids == real("qwen2.5").encode(text)
    million = " " * 300_000 + "b"
    assert tokenizer.decode(tokenizer.encode(million)) == million
    assert tiktoken_tokenizer.MAX_BLANK_RUN >= 10_000


ALL = "".join(
    f"{__import__('base64').b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256)
)


def test_a_vocabulary_of_bytes_works():
    tokenizer = load_tokenizer({"qwen.tiktoken": ALL.encode()})
    assert tokenizer.encode("aé") == [97, 195, 169]
    assert tokenizer.special["<|endoftext|>"] == 256


@pytest.mark.parametrize(
    "data",
    [ALL + "IQ== 256\n", ALL + "aGU= 300\n", ALL + "aGU=\n", ALL + "!!!! 256\n", ALL[:50], "\n"],
)
def test_duplicates_gaps_and_truncation_are_refused(data):
    with pytest.raises(TokenizerError, match=r"qwen\.tiktoken"):
        load_tokenizer({"qwen.tiktoken": data.encode()})


BYTES = b"".join(base64.b64encode(bytes([i])) + f" {i}\n".encode() for i in range(256))
MERGED = BYTES + base64.b64encode(b"12") + b" 256\n" + base64.b64encode("中文".encode()) + b" 257\n"


def vocabulary(name: str, **config: Any) -> dict[str, bytes]:
    """A small vocabulary and its tokenizer_config.json."""
    return {name: MERGED, "tokenizer_config.json": json.dumps(config).encode()}


def added(*texts: str, first: int = 258, **entry: Any) -> dict[str, Any]:
    """An added_tokens_decoder."""
    return {str(first + i): {"content": text, **entry} for i, text in enumerate(texts)}


def test_hunyuans_vocabulary_has_its_own_control_tokens() -> None:
    """tokenization_hy.py of Hunyuan-A13B: five names behind the ranks, then 205 spare ones."""
    twice = MERGED + base64.b64encode(b"1") + b" 258\n" + base64.b64encode(b"34") + b" 259\n"
    tokenizer = load_tokenizer({"hy.tiktoken": twice})
    assert tokenizer.encode("34", bos=False) == [ord("3"), ord("4")]  # single digits are words
    assert tokenizer.token_bytes(258) == b"34"  # what comes twice is counted once
    names = ["<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>", "<|extra_0|>"]
    assert [tokenizer.special[name] for name in names] == list(range(259, 265))
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (260, (262,), 263)
    assert "<|im_start|>" not in tokenizer.special


def test_kimis_vocabulary_has_its_own_words_and_tokens() -> None:
    """tokenization_kimi.py: Han characters apart, 256 reserved ids, some of them named."""
    tokens = added("[BOS]", "[EOS]", "<|im_end|>", special=True)
    tokens |= added("<|tool_call_begin|>", first=261, special=False)
    config = {"added_tokens_decoder": tokens, "bos_token": "[BOS]", "eos_token": "[EOS]"}
    tokenizer = load_tokenizer(
        vocabulary("tiktoken.model", tokenizer_class="TikTokenTokenizer", **config)
    )
    assert tokenizer.encode("a中文b") == [ord("a"), 257, ord("b")]
    assert tokenizer.encode("12") == [256]  # up to three digits are a word
    assert tokenizer.special["<|reserved_token_262|>"] == 262
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (514, 258, (259,))
    assert tokenizer.encode("<|im_end|>", special=True) == [260]
    assert tokenizer.decode([260, 261, ord("x")]) == "<|tool_call_begin|>x"


def test_glm_4s_vocabulary_is_a_tokenizer_model_of_another_format() -> None:
    """tokenization_chatglm.py of glm-4-9b: prompts begin with [gMASK] and <sop>."""
    tokens = added("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", special=True)
    config: dict[str, Any] = {"tokenizer_class": "ChatGLM4Tokenizer"}
    tokenizer = load_tokenizer(vocabulary("tokenizer.model", added_tokens_decoder=tokens, **config))
    assert tokenizer.encode("12") == [260, 262, 256]
    assert tokenizer.encode("12", bos=False) == [256]
    assert tokenizer.encode("[gMASK]<sop>1", bos=False, special=True) == [260, 262, ord("1")]
    # nothing is composed
    assert tokenizer.encode("e\u0301", bos=False) == list("e\u0301".encode())
    with pytest.raises(TokenizerError, match="control tokens are in the added_tokens_decoder"):
        load_tokenizer(vocabulary("tokenizer.model", **config))


def test_a_vocabulary_of_an_unknown_publisher_is_refused() -> None:
    with pytest.raises(TokenizerError, match=r"own.tiktoken: .*tokenizer_class 'OwnTokenizer'"):
        load_tokenizer(vocabulary("own.tiktoken", tokenizer_class="OwnTokenizer"))
    # names that several publishers use: Meta's Llama 3 has a tokenizer.model like GLM-4's
    for name in ("tiktoken.model", "tokenizer.model"):
        with pytest.raises(TokenizerError, match=rf"{name}: .*has no tokenizer_class"):
            load_tokenizer({name: MERGED})
    by_class = load_tokenizer(vocabulary("own.tiktoken", tokenizer_class="QWenTokenizer"))
    assert "<|im_start|>" in by_class.special


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (added("<|end|>", first=65), "'<|end|>' the id 65, which is another token's"),
        (added("<|end|>", "<|end|>"), "two ids"),
    ],
)
def test_control_tokens_have_ids_of_their_own(tokens: dict[str, Any], words: str) -> None:
    with pytest.raises(TokenizerError, match=re.escape(words)):
        load_tokenizer(vocabulary("qwen.tiktoken", added_tokens_decoder=tokens))


def test_chatglm2_and_3_have_tokens_behind_the_pieces(real: Any, shared: Any) -> None:
    """tokenization_chatglm.py of chatglm3-6b: nine tokens, and two in front of a prompt."""
    model = (shared / "data/tokenizers/llama/tokenizer.model").read_bytes()
    config = json.dumps({"tokenizer_class": "ChatGLMTokenizer"}).encode()
    tokenizer = load_tokenizer({"tokenizer.model": model, "tokenizer_config.json": config})
    pieces = real("llama").vocab_size
    assert tokenizer.special["<|user|>"] == pieces + 6
    plain = real("llama").encode("Hello", bos=False)
    assert tokenizer.encode("Hello") == [pieces + 1, pieces + 3, *plain]
    assert tokenizer.encode("[gMASK]sop", bos=False, special=True)[:2] == [pieces + 1, pieces + 3]
