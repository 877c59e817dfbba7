"""Vocabularies in tiktoken's format: base64 bytes and a rank per line, used in several ways.

The file has no word about how text is cut and which ids are control tokens: both are in the code
that comes with a model. ``tokenizer_class`` of tokenizer_config.json says whose it is, else a
file's name that has the publisher's.
"""

from __future__ import annotations

import base64
import binascii
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import tiktoken

from modelmill.core.errors import TokenizerError
from modelmill.text.pre_tokenizers import PRE_TOKENIZERS
from modelmill.text.rust_errors import build_raising_tokenizer_error, is_rust_panic
from modelmill.text.tokenizer_base import Tokenizer, VocabInfo
from modelmill.text.tokenizer_files import (
    TokenizerSettings,
    check_bos_eos_in_vocab,
    parse_json_file,
    read_tokenizer_settings,
    unique_ids,
)

ENDOFTEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
EXTRA_TOKENS = tuple(f"<|extra_{i}|>" for i in range(205))


@dataclass(frozen=True)
class TiktokenFormat:
    """How a publisher's models use such a file.

    Attributes:
        words: The name in ``PRE_TOKENIZERS`` whose one cut is tiktoken's.
        control_tokens: Those behind the ranks, in order.
        reserved: Ids behind the ranks that are control tokens, whether they have a name or not.
        names: bos_token, eos_token and pad_token where tokenizer_config.json names none.
        prefix: Control tokens that begin a prompt.
        skips_duplicates: Whether bytes that come twice count once, and ranks are counted anew.
    """

    words: str
    control_tokens: tuple[str, ...] = ()
    reserved: int = 0
    names: tuple[str, str, str] = (ENDOFTEXT, ENDOFTEXT, ENDOFTEXT)
    prefix: tuple[str, ...] = ()
    skips_duplicates: bool = False


QWEN_TIKTOKEN_FORMAT = TiktokenFormat("qwen2", (ENDOFTEXT, IM_START, IM_END, *EXTRA_TOKENS))
HUNYUAN_TIKTOKEN_FORMAT = TiktokenFormat(
    "hunyuan",
    (ENDOFTEXT, "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>", *EXTRA_TOKENS),
    names=("<|startoftext|>", "<|eos|>", "<|pad|>"),
    skips_duplicates=True,
)
KIMI_TIKTOKEN_FORMAT = TiktokenFormat("kimi-k2", reserved=256, names=("[BOS]", "[EOS]", "[PAD]"))
CHATGLM4_TIKTOKEN_FORMAT = TiktokenFormat("chatglm-bpe", prefix=("[gMASK]", "<sop>"))
FORMATS_BY_CLASS = {
    "QWenTokenizer": QWEN_TIKTOKEN_FORMAT,
    "HYTokenizer": HUNYUAN_TIKTOKEN_FORMAT,
    "TikTokenTokenizer": KIMI_TIKTOKEN_FORMAT,
    "ChatGLM4Tokenizer": CHATGLM4_TIKTOKEN_FORMAT,
}
FORMATS_BY_FILE = {"qwen.tiktoken": QWEN_TIKTOKEN_FORMAT, "hy.tiktoken": HUNYUAN_TIKTOKEN_FORMAT}
# The library's regex engine keeps one backtracking state per space and gives up near a million of
# them.
MAX_BLANK_RUN = 50_000
# Canonical ordering is quadratic in a run of combining marks; natural text has runs of a few.
MAX_COMBINING_MARK_RUN = 256
LONG_BLANK_RUN = re.compile(rf"\s{{{MAX_BLANK_RUN + 1},}}")
# U+0300 is the first combining mark
POSSIBLE_COMBINING_RUN_PATTERN = re.compile(rf"[^\x00-\u02ff]{{{MAX_COMBINING_MARK_RUN + 1},}}")


def load_tiktoken_tokenizer(files: Mapping[str, bytes], name: str) -> Tokenizer:
    """Load the vocabulary ``name`` among the files.

    Raises:
        TokenizerError: if the file is broken, or it is not known whose it is; the message names it.
    """
    tokenizer_class = parse_json_file(files, "tokenizer_config.json").get("tokenizer_class")
    known = FORMATS_BY_CLASS.get(str(tokenizer_class)) or FORMATS_BY_FILE.get(name)
    if known is None:
        raise TokenizerError(
            f"{name}: how this vocabulary cuts text is not known; tokenizer_config.json has "
            f"{'no' if tokenizer_class is None else 'the'} tokenizer_class"
            f"{'' if tokenizer_class is None else f' {str(tokenizer_class)[:40]!r}'}, known are "
            f"{', '.join(FORMATS_BY_CLASS)}; save the tokenizer as a tokenizer.json"
        )
    ranks = parse_token_ranks(files[name], name, skips_duplicates=known.skips_duplicates)
    settings = read_tokenizer_settings(files)
    special = _merge_control_tokens(known, ranks, settings, name)
    words = PRE_TOKENIZERS[known.words]
    check_bos_eos_in_vocab(settings.special_tokens, special, name)
    encoding = build_raising_tokenizer_error(
        name,
        lambda: tiktoken.Encoding(
            name, pat_str=words.cuts[0], mergeable_ranks=ranks, special_tokens=special
        ),
    )
    return TiktokenTokenizer(
        encoding, _make_vocab_info(known, special, settings), normalizes=words.normalizes
    )


def _merge_control_tokens(
    known: TiktokenFormat, ranks: Mapping[bytes, int], settings: TokenizerSettings, name: str
) -> dict[str, int]:
    """Return text → id: those of the format, of tokenizer_config.json, and unnamed ones.

    Raises:
        TokenizerError: if there are none, one text has two ids, or one's id is another token's.
    """
    first = len(ranks)
    named = {id: str(entry["content"]) for id, entry in settings.added_tokens.items()}
    for id, text in named.items():
        # an id that text becomes, too, would be a control token that a user can type
        if id < first and ranks.get(text.encode("utf-8", "replace")) != id:
            raise TokenizerError(
                f"tokenizer_config.json: added_tokens_decoder gives {text!r} the id {id}, which is "
                f"another token's in {name}"
            )
    by_id = {id: f"<|reserved_token_{id}|>" for id in range(first, first + known.reserved)}
    by_id |= {first + i: text for i, text in enumerate(known.control_tokens)}
    by_id |= {id: text for id, text in named.items() if id >= first}
    special = {text: id for id, text in sorted(by_id.items())}
    if len(special) != len(by_id):
        raise TokenizerError(f"tokenizer_config.json: two ids behind {name} have the same text")
    if not special:
        raise TokenizerError(
            f"{name}: its control tokens are in the added_tokens_decoder of tokenizer_config.json, "
            "which is missing; copy it from the same model"
        )
    return special


def _make_vocab_info(
    known: TiktokenFormat, special: Mapping[str, int], settings: TokenizerSettings
) -> VocabInfo:
    """Return the facts; tokens that tokenizer_config.json does not call special are decoded."""
    keys = ("bos_token", "eos_token", "pad_token")
    names = dict(zip(keys, known.names, strict=True)) | dict(settings.special_tokens)
    names = {key: text for key, text in names.items() if text in special}
    bos, eos, pad = (special.get(names.get(key, "")) for key in keys)
    shown = {id for id, entry in settings.added_tokens.items() if entry.get("special") is False}
    begins = (bos,) if bos is not None and settings.add_bos else ()
    return VocabInfo(
        tokenizer_type="tiktoken",
        vocab_size=max(special.values()) + 1,
        special=special,
        skipped_ids=frozenset(special.values()) - shown,
        bos_id=bos,
        eos_ids=unique_ids([eos, *settings.eos_ids]),
        pad_id=pad,
        prefix=(*(special[text] for text in known.prefix if text in special), *begins),
        template_names=names,
    )


class TiktokenTokenizer(Tokenizer):
    """tiktoken's BPE with a publisher's cuts, normalization and control tokens."""

    def __init__(self, encoding: tiktoken.Encoding, traits: VocabInfo, *, normalizes: bool) -> None:
        super().__init__(traits)
        self._encoding = encoding
        self._normalizes = normalizes

    def _encode_ordinary(self, text: str, at_start: bool) -> list[int]:
        del at_start  # byte-level: the ids do not depend on the position of the text
        ids: list[int] = []
        for part in _split_overlong_whitespace_runs(
            normalize_nfc(text) if self._normalizes else text
        ):
            try:
                ids.extend(self._encoding.encode_ordinary(part))
            except BaseException as error:
                if not is_rust_panic(error):
                    raise
                raise TokenizerError(
                    f"{self._encoding.name} cannot split this text: its pattern gives up on it or "
                    "finds empty words"
                ) from None
        return ids

    def token_bytes(self, id: int) -> bytes:
        """Return the exact bytes of a token; b"" for an unknown id."""
        try:
            return self._encoding.decode_single_token_bytes(id) if id >= 0 else b""
        except KeyError:  # between the ranks and the control tokens
            return b""


def normalize_nfc(text: str) -> str:
    """Normalize to NFC in linear time: long runs of combining marks are normalized in parts."""
    if text.isascii() or not POSSIBLE_COMBINING_RUN_PATTERN.search(text):
        return unicodedata.normalize("NFC", text)
    parts: list[str] = []
    start, marks = 0, 0
    for index, char in enumerate(text):
        marks = marks + 1 if unicodedata.combining(char) else 0
        if marks == MAX_COMBINING_MARK_RUN:
            parts.append(unicodedata.normalize("NFC", text[start : index + 1]))
            start, marks = index + 1, 0
    parts.append(unicodedata.normalize("NFC", text[start:]))
    return "".join(parts)


def _split_overlong_whitespace_runs(text: str) -> Iterator[str]:
    """`text` cut inside blank runs that the library could not take; any other text in one part."""
    start = 0
    for run in LONG_BLANK_RUN.finditer(text):
        for cut in range(run.start() + MAX_BLANK_RUN, run.end() - 1, MAX_BLANK_RUN):
            yield text[start:cut]
            start = cut
    yield text[start:]


def parse_token_ranks(
    data: bytes, name: str, *, skips_duplicates: bool = False
) -> dict[bytes, int]:
    """Token bytes → rank; ranks must be 0, 1, 2, … without gaps.

    Args:
        data: The file.
        name: Of the file.
        skips_duplicates: Whether bytes that come twice count once, and ranks are counted anew.

    Raises:
        TokenizerError: for a line that is no such pair, which the message names, or missing bytes.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        try:
            text, stated = line.split()
            token, rank = base64.b64decode(text, validate=True), int(stated)
            if skips_duplicates:
                ranks.setdefault(token, len(ranks))
            elif ranks.setdefault(token, rank) != len(ranks) - 1:
                raise ValueError
        except (ValueError, binascii.Error):
            raise TokenizerError(
                f"{name}: line {number} is not the next 'base64 rank' pair"
            ) from None
    check_all_bytes_present(ranks, name)
    return ranks


def check_all_bytes_present(ranks: Mapping[bytes, int], name: str) -> None:
    """Check that every byte is a token: tiktoken panics on a text that has another.

    Raises:
        TokenizerError: if one is missing.
    """
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise TokenizerError(
            f"{name}: no token for the byte 0x{missing[0]:02x}; the file is empty or truncated"
        )
