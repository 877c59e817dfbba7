"""Mistral's tekken.json; the ids of real files were compared with the package mistral-common."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import tokenizers

from modelmill.core.errors import TokenizerError
from modelmill.text.tokenizer_loader import load_tokenizer

PATTERN = r"\p{L}+|\p{N}|\s+|[^\s\p{L}\p{N}]+"
TOKENS = [*(bytes([i]) for i in range(256)), b"he", b"hel", b"beyond"]


def tekken(**changes: Any) -> dict[str, bytes]:
    """A small file: 30 control tokens, 258 others that the model has, and one more."""
    config = {
        "pattern": PATTERN, "default_vocab_size": 288, "default_num_special_tokens": 30,
        "version": "v11",
    }  # fmt: skip
    vocab = [
        {"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for i, token in enumerate(TOKENS)
    ]
    return {"tekken.json": json.dumps({"config": config, "vocab": vocab, **changes}).encode()}


def test_ids_begin_behind_the_control_tokens() -> None:
    tokenizer = load_tokenizer(tekken())
    assert tokenizer.encode("hello") == [1, 30 + 257, 30 + ord("l"), 30 + ord("o")]
    assert tokenizer.encode("[INST]hel[/INST]", bos=False, special=True) == [3, 287, 4]
    assert tokenizer.encode("beyond", bos=False) == [30 + byte for byte in b"beyond"]
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (288, 1, (2,))
    assert tokenizer.special["<SPECIAL_29>"] == 29
    assert tokenizer.decode([3, 287, 30 + ord("p"), 2]) == "help"
    assert tokenizer.token_bytes(3) == b"[INST]"
    assert tokenizer.token_bytes(288) == b""


def test_listed_control_tokens_take_the_place_of_the_older_ones() -> None:
    listed = [
        {"rank": 0, "token_str": "<unk>", "is_control": True},
        {"rank": 1, "token_str": "<s>", "is_control": True},
        {"rank": 2, "token_str": "</s>", "is_control": True},
        {"rank": 5, "token_str": "[THINK]", "is_control": False},
    ]
    tokenizer = load_tokenizer(tekken(special_tokens=listed))
    assert "[INST]" not in tokenizer.special
    assert tokenizer.decode([5, 30 + ord("a")]) == "[THINK]a"
    assert tokenizer.special["<SPECIAL_3>"] == 3


def test_it_comes_before_a_tokenizer_json_and_settings_count() -> None:
    config = json.dumps({"add_bos_token": False, "eos_token": "[/INST]"}).encode()
    files = {**tekken(), "tokenizer.json": b"{}", "tokenizer_config.json": config}
    tokenizer = load_tokenizer(files)
    assert (tokenizer.tokenizer_type, tokenizer.eos_ids) == ("tekken", (4,))
    assert tokenizer.encode("hel") == [287]


def test_a_tokenizer_json_with_further_tokens_comes_before_it() -> None:
    """Of a model trained further, whose folder has the tekken.json of the one before."""
    added = {"20": {"content": "<|im_end|>", "special": True}, "21": {"content": "<SPECIAL_21>"}}
    config: dict[str, Any] = {"added_tokens_decoder": added}
    core = tokenizers.Tokenizer(tokenizers.models.BPE({chr(97 + i): i for i in range(20)}, []))
    core.decoder = tokenizers.decoders.ByteLevel()
    files = {**tekken(), "tokenizer.json": core.to_str().encode()}
    files["tokenizer_config.json"] = json.dumps(config).encode()
    assert load_tokenizer(files).tokenizer_type == "hf"
    del added["20"]
    files["tokenizer_config.json"] = json.dumps(config).encode()
    assert load_tokenizer(files).tokenizer_type == "tekken"


def test_an_end_of_text_that_it_does_not_have_is_refused() -> None:
    config = json.dumps({"eos_token": "<|im_end|>"}).encode()
    with pytest.raises(TokenizerError, match=r"eos_token '<\|im_end\|>' .* of tekken\.json"):
        load_tokenizer({**tekken(), "tokenizer_config.json": config})


def test_a_pattern_that_the_library_panics_on_is_an_error() -> None:
    """A Rust panic is no Exception in Python, and would end a server's worker."""
    config = {"pattern": "", "default_vocab_size": 288, "default_num_special_tokens": 30}
    tokenizer = load_tokenizer(tekken(config=config))
    with pytest.raises(TokenizerError, match="cannot split this text"):
        tokenizer.encode("ab")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config": {}}, "needs a config with a pattern"),
        ({"config": {"pattern": "a", "default_vocab_size": 9}}, "must be an integer above"),
        ({"vocab": []}, "at least 258 tokens"),
        ({"vocab": [{"rank": 0, "token_bytes": "AA=="}] * 258}, "vocab 1 must have the rank 1"),
        ({"special_tokens": [{"rank": 30, "token_str": "x"}]}, "rank below 30"),
        ({"special_tokens": [{"rank": i, "token_str": "x"} for i in (0, 1)]}, "a token twice"),
        ({"special_tokens": {}}, "must be a list"),
        ({"special_tokens": [{"rank": 0, "token_str": "\ud800"}]}, "a token_str"),
        ({"config": {"pattern": "a", "default_vocab_size": 130,
                     "default_num_special_tokens": 30}}, "no token for the byte 0x64"),
        # as many control tokens would take gigabytes, though the file is small
        ({"config": {"pattern": "a", "default_vocab_size": 2**31 - 1,
                     "default_num_special_tokens": 2**31 - 2}}, "up to 65536 are read"),
        (
            {"config": {"pattern": "(", "default_vocab_size": 288,
                        "default_num_special_tokens": 30}},
            "cannot be read as a tokenizer",
        ),
    ],
)  # fmt: skip
def test_broken_files_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TokenizerError, match=rf"tekken\.json.*{words}"):
        load_tokenizer(tekken(**changes))
