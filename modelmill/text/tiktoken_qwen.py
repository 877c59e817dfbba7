"""Qwen v1's vocabulary: qwen.tiktoken (base64 bytes and a rank per line), after NFC."""

from __future__ import annotations

import base64
import binascii
import re
import unicodedata
from collections.abc import Iterator, Mapping

import tiktoken

from modelmill.core.errors import TokenizerError
from modelmill.text.tokenizer_base import Tokenizer, VocabInfo
from modelmill.text.tokenizer_files import read_settings, unique_ids

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ENDOFTEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL_TOKENS = (ENDOFTEXT, IM_START, IM_END, *(f"<|extra_{i}|>" for i in range(205)))
# The library's regex engine keeps one backtracking state per space and gives up near a million of
# them.
MAX_BLANK_RUN = 50_000
# Canonical ordering is quadratic in a run of combining marks; natural text has runs of a few.
MAX_MARK_RUN = 256
LONG_BLANK_RUN = re.compile(rf"\s{{{MAX_BLANK_RUN + 1},}}")
# U+0300 is the first combining mark
LONG_MARK_RUN = re.compile(rf"[^\x00-\u02ff]{{{MAX_MARK_RUN + 1},}}")


def load_tiktoken_tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
    """The one *.tiktoken among `files`; raises TokenizerError naming it when it is broken."""
    name = next(name for name in sorted(files) if name.endswith(".tiktoken"))
    ranks = read_ranks(files[name], name)
    special = {text: len(ranks) + i for i, text in enumerate(CONTROL_TOKENS)}
    settings = read_settings(files)
    try:
        encoding = tiktoken.Encoding(
            name, pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=special
        )
    except Exception as error:
        raise TokenizerError(
            f"{name} cannot be read as a tokenizer: {' '.join(str(error).split())[:160]}"
        ) from None
    end = special[ENDOFTEXT]
    traits = VocabInfo(
        tokenizer_type="tiktoken",
        vocab_size=len(ranks) + len(special),
        special=special,
        skipped_ids=frozenset(special.values()),
        bos_id=end,
        eos_ids=unique_ids([end, *settings.eos_ids]),
        pad_id=end,
        template_names={"bos_token": ENDOFTEXT, "eos_token": ENDOFTEXT, "pad_token": ENDOFTEXT},
    )
    return QwenTokenizer(encoding, traits)


class QwenTokenizer(Tokenizer):
    """tiktoken's BPE with Qwen's split, normalisation and control tokens."""

    def __init__(self, encoding: tiktoken.Encoding, traits: VocabInfo) -> None:
        super().__init__(traits)
        self._encoding = encoding

    def _encode_ordinary(self, text: str, at_start: bool) -> list[int]:
        del at_start  # byte-level: the ids do not depend on the position of the text
        ids: list[int] = []
        for part in _split_blank_runs(normalize_nfc(text)):
            ids.extend(self._encoding.encode_ordinary(part))
        return ids

    def token_bytes(self, id: int) -> bytes:
        """Return the exact bytes of a token; b"" for an unknown id."""
        if not 0 <= id < self.vocab_size:
            return b""
        return self._encoding.decode_single_token_bytes(id)


def normalize_nfc(text: str) -> str:
    """Normalize to NFC in linear time: long runs of combining marks are normalized in parts."""
    if text.isascii() or not LONG_MARK_RUN.search(text):
        return unicodedata.normalize("NFC", text)
    parts: list[str] = []
    start, marks = 0, 0
    for index, char in enumerate(text):
        marks = marks + 1 if unicodedata.combining(char) else 0
        if marks == MAX_MARK_RUN:
            parts.append(unicodedata.normalize("NFC", text[start : index + 1]))
            start, marks = index + 1, 0
    parts.append(unicodedata.normalize("NFC", text[start:]))
    return "".join(parts)


def _split_blank_runs(text: str) -> Iterator[str]:
    """`text` cut inside blank runs that the library could not take; any other text in one part."""
    start = 0
    for run in LONG_BLANK_RUN.finditer(text):
        for cut in range(run.start() + MAX_BLANK_RUN, run.end() - 1, MAX_BLANK_RUN):
            yield text[start:cut]
            start = cut
    yield text[start:]


def read_ranks(data: bytes, name: str) -> dict[bytes, int]:
    """Token bytes → rank; ranks must be 0, 1, 2, … without gaps.

    Raises TokenizerError naming the line.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            if (
                ranks.setdefault(base64.b64decode(token, validate=True), int(rank))
                != len(ranks) - 1
            ):
                raise ValueError
        except (ValueError, binascii.Error):
            raise TokenizerError(
                f"{name}: line {number} is not the next 'base64 rank' pair"
            ) from None
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise TokenizerError(
            f"{name}: no token for the byte 0x{missing[0]:02x}; the file is empty or truncated"
        )
    return ranks
