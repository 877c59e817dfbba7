"""Mistral's tekken.json: control tokens first, then the vocabulary with its ranks behind them."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Container, Mapping
from typing import Any

import tiktoken

from modelmill.core.errors import TokenizerError
from modelmill.text.hf_tokenizer import load_tokenizer_json
from modelmill.text.rust_errors import build_raising_tokenizer_error
from modelmill.text.tiktoken_tokenizer import TiktokenTokenizer, check_all_bytes_present
from modelmill.text.tokenizer_base import Tokenizer, VocabInfo, replace_surrogates
from modelmill.text.tokenizer_files import (
    check_bos_eos_in_vocab,
    is_token_id,
    parse_json_file,
    read_tokenizer_settings,
    unique_ids,
)

TEKKEN_FILE = "tekken.json"
# of files that do not list them, which have the versions up to 7
DEFAULT_CONTROL_TOKENS = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]",
    "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)  # fmt: skip
MAX_CONTROL_TOKENS = 1 << 16
"""Above all real files, which have 1,000; each takes memory, though the file need not list it."""
SPARE_TOKEN_PATTERN = re.compile(r"<SPECIAL_\d+>")
SPECIAL_TOKEN_BY_KEY = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
}


def load_tekken_tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
    """Load tekken.json; a tokenizer.json beside it instead if it has control tokens of its own.

    Raises:
        TokenizerError: if the file is invalid; the message says what.
    """
    data = parse_json_file(files, TEKKEN_FILE)
    config = data.get("config")
    if not isinstance(config, dict) or not isinstance(config.get("pattern"), str):
        raise TokenizerError(f"{TEKKEN_FILE}: needs a config with a pattern")
    size, first = (config.get(f"default_{key}") for key in ("vocab_size", "num_special_tokens"))
    if not is_token_id(size) or not is_token_id(first) or not first < size:
        raise TokenizerError(
            f"{TEKKEN_FILE}: default_vocab_size must be an integer above default_num_special_tokens"
        )
    if first > MAX_CONTROL_TOKENS:
        raise TokenizerError(
            f"{TEKKEN_FILE}: default_num_special_tokens is {first}; up to {MAX_CONTROL_TOKENS} are "
            "read"
        )
    special, control = _read_control_tokens(data, first)
    settings = read_tokenizer_settings(files)
    if "tokenizer.json" in files and _adds_unlisted_tokens(settings.added_tokens, special):
        return load_tokenizer_json(files)
    check_bos_eos_in_vocab(settings.special_tokens, special, TEKKEN_FILE)
    ranks = _read_token_ranks(data, size - first)
    encoding = build_raising_tokenizer_error(
        TEKKEN_FILE,
        lambda: tiktoken.Encoding(
            TEKKEN_FILE, pat_str=config["pattern"], mergeable_ranks=ranks, special_tokens={}
        ),
    )
    names = {
        key: text
        for key, text in (SPECIAL_TOKEN_BY_KEY | dict(settings.special_tokens)).items()
        if text in special
    }
    bos, eos, pad = (special.get(names.get(f"{key}_token", "")) for key in ("bos", "eos", "pad"))
    traits = VocabInfo(
        tokenizer_type="tekken",
        vocab_size=size,
        special=special,
        skipped_ids=frozenset(special[text] for text in control),
        bos_id=bos,
        eos_ids=unique_ids([eos, *settings.eos_ids]),
        pad_id=pad,
        prefix=(bos,) if bos is not None and settings.add_bos is not False else (),
        suffix=(eos,) if eos is not None and settings.add_eos else (),
        template_names=names,
    )
    return TekkenTokenizer(encoding, traits, first)


def _adds_unlisted_tokens(added: Mapping[int, Mapping[str, Any]], special: Container[str]) -> bool:
    """Whether tokenizer_config.json adds tokens that tekken.json does not have."""
    texts = (str(entry["content"]) for entry in added.values())
    return any(text not in special and not SPARE_TOKEN_PATTERN.fullmatch(text) for text in texts)


def _read_control_tokens(data: Mapping[str, Any], count: int) -> tuple[dict[str, int], set[str]]:
    """Return text → id of all tokens before the vocabulary, and the texts that are not decoded."""
    listed = data.get("special_tokens")
    if listed is None:
        rows = [{"rank": i, "token_str": text} for i, text in enumerate(DEFAULT_CONTROL_TOKENS)]
    elif isinstance(listed, list) and all(isinstance(row, dict) for row in listed):
        rows = listed
    else:
        raise TokenizerError(f"{TEKKEN_FILE}: special_tokens must be a list of objects")
    by_id = {i: f"<SPECIAL_{i}>" for i in range(count)}
    shown: set[str] = set()
    for row in rows:
        id, text = row.get("rank"), row.get("token_str")
        valid = isinstance(text, str) and text and text == replace_surrogates(text)
        if not is_token_id(id) or id >= count or not valid:
            raise TokenizerError(
                f"{TEKKEN_FILE}: special_tokens must have a rank below {count} and a token_str"
            )
        by_id[id] = str(text)
        if row.get("is_control") is False:
            shown.add(str(text))
    special = {text: id for id, text in by_id.items()}
    if len(special) != count:
        raise TokenizerError(f"{TEKKEN_FILE}: special_tokens has a token twice")
    return special, set(special) - shown


def _read_token_ranks(data: Mapping[str, Any], count: int) -> dict[bytes, int]:
    """Return bytes → rank of the tokens that the model has; the file may have more."""
    rows = data.get("vocab")
    if not isinstance(rows, list) or len(rows) < count:
        raise TokenizerError(f"{TEKKEN_FILE}: vocab must be a list of at least {count} tokens")
    ranks: dict[bytes, int] = {}
    for rank, row in enumerate(rows[:count]):
        try:
            token = base64.b64decode(row["token_bytes"], validate=True)
            valid = row["rank"] == rank and token not in ranks
        except (TypeError, KeyError, ValueError, binascii.Error):
            valid = False
        if not valid:
            raise TokenizerError(
                f"{TEKKEN_FILE}: vocab {rank} must have the rank {rank} and token_bytes of its own"
            )
        ranks[token] = rank
    check_all_bytes_present(ranks, TEKKEN_FILE)
    return ranks


class TekkenTokenizer(TiktokenTokenizer):
    """tiktoken's BPE, whose ids begin behind the control tokens."""

    def __init__(self, encoding: tiktoken.Encoding, traits: VocabInfo, first: int) -> None:
        super().__init__(encoding, traits, normalizes=False)
        self._first = first
        self._control_bytes = {id: text.encode() for text, id in traits.special.items()}

    def _encode_ordinary(self, text: str, at_start: bool) -> list[int]:
        return [self._first + id for id in super()._encode_ordinary(text, at_start)]

    def token_bytes(self, id: int) -> bytes:
        """Return the exact bytes of a token; b"" for an unknown id."""
        if id < self._first:
            return self._control_bytes.get(id, b"")
        return super().token_bytes(id - self._first)
