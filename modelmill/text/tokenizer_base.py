"""What every tokenizer of ours offers, whatever file it came from.

Control tokens (``special``) can only come from text when the caller asks for it with
``special=True``: a
user who types ``<|im_end|>`` has typed eight harmless characters.
"""

from __future__ import annotations

import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from modelmill.core.errors import TokenizerError
from modelmill.text.regex_union import regex_union
from modelmill.text.utf8 import Utf8Stream

# Unicode's own list: Python counts four control characters more
WHITESPACE = frozenset("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | frozenset(
    map(chr, range(0x2000, 0x200B))
)
_JOINERS = "\u200c\u200d"
COUNT_CHUNK_CHARS = 16384
"""Characters that are counted together where a text may be too long."""
CUT_SLACK_TOKENS = 8
"""Tokens that a cut may make more of a text."""


@dataclass(frozen=True)
class VocabInfo:
    """The facts about a vocabulary that do not depend on how it splits text."""

    tokenizer_type: str  # "hf", "tiktoken", "sentencepiece", "gguf-bpe" or "gguf-spm"
    vocab_size: int  # the highest id + 1
    special: Mapping[str, int]  # control tokens: their text → id
    skipped_ids: frozenset[int]  # ids that decode(skip_special=True) leaves out
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    prefix: tuple[int, ...] = ()  # what bos=None puts before the text
    suffix: tuple[int, ...] = ()  # what bos=None puts after the text
    # bos_token, eos_token, … for templates
    template_names: Mapping[str, str] = field(default_factory=dict)
    # of control tokens: whether it eats whitespace (left, right), and whether it is one only where
    # no word touches it
    edges: Mapping[str, tuple[bool, bool, bool]] = field(default_factory=dict)


class Tokenizer(ABC):
    """Text ↔ token ids. Thread-safe: nothing changes after construction but caches."""

    # one U+FFFD per invalid byte (SentencePiece) instead of one per broken sequence
    each_byte = False

    def __init__(self, traits: VocabInfo) -> None:
        self.tokenizer_type = traits.tokenizer_type
        self.vocab_size = traits.vocab_size
        self.special: dict[str, int] = dict(traits.special)
        self.bos_id = traits.bos_id
        self.eos_ids = traits.eos_ids
        self.pad_id = traits.pad_id
        self.template_names = dict(traits.template_names)
        self.max_tokens: int | None = None  # tokens of one text; None: any number
        self._skipped = traits.skipped_ids
        self._prefix = list(traits.prefix)
        self._suffix = list(traits.suffix)
        # a token of one character cannot be told from the character, so it is never read out of
        # text
        self._special_pattern = _special_pattern([text for text in traits.special if len(text) > 1])
        self._edges = {text: edges for text, edges in traits.edges.items() if any(edges)}

    # -- text → ids

    def encode(self, text: str, *, bos: bool | None = None, special: bool = False) -> list[int]:
        """Ids of `text`.

        bos: True puts bos_id first, False nothing, None what this tokenizer does by default.
        special: True reads control tokens out of the text; otherwise they are split like any other
        text.
        Raises TokenizerError if bos is requested from a vocabulary without one.
        """
        text = replace_surrogates(text)
        pieces = self.split_special(text) if special else [text]
        ids = self.encode_pieces(pieces)
        if bos is None:
            return [*self._prefix, *ids, *self._suffix]
        if bos and self.bos_id is None:
            raise TokenizerError(
                "this tokenizer has no beginning-of-text token; encode with bos=False"
            )
        return [self.bos_id, *ids] if bos and self.bos_id is not None else ids

    def encode_pieces(self, pieces: Iterable[str | int]) -> list[int]:
        """Encode plain text (str) and ids (int) in turn; no BOS, no control tokens from text."""
        ids: list[int] = []
        at_start = True
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            elif piece:
                text = replace_surrogates(piece)
                self._check_length(text)
                ids.extend(self._encode_ordinary(text, at_start))
            at_start = False
        return ids

    def _check_length(self, text: str) -> None:
        """Check the length; a text is split, since tokenizing it whole takes 500 bytes per token.

        Raises:
            TokenizerError: if the text has more than ``most`` tokens.
        """
        if self.max_tokens is None or len(text) <= self.max_tokens:
            return
        count = 0
        for at in range(0, len(text), COUNT_CHUNK_CHARS):
            count += max(
                len(self._encode_ordinary(text[at : at + COUNT_CHUNK_CHARS], at == 0))
                - CUT_SLACK_TOKENS,
                0,
            )
            if count > self.max_tokens:
                raise TokenizerError(
                    f"the prompt has more than {self.max_tokens} tokens; shorten it"
                )

    def split_special(self, text: str) -> list[str | int]:
        """`text` cut at its control tokens: ordinary text as str, control tokens as their ids."""
        if self._special_pattern is None:
            return [text]
        pieces: list[str | int] = []
        end = 0
        for match in self._special_pattern.finditer(text):
            start, stop = match.span()
            eats_left, eats_right, alone = self._edges.get(match[0], (False, False, False))
            if alone and (
                _is_word_char(text[start - 1 : start]) or _is_word_char(text[stop : stop + 1])
            ):
                continue
            while eats_left and start > end and text[start - 1] in WHITESPACE:
                start -= 1
            while eats_right and stop < len(text) and text[stop] in WHITESPACE:
                stop += 1
            if start > end:
                pieces.append(text[end:start])
            pieces.append(self.special[match[0]])
            end = max(stop, end)
        if end < len(text) or not pieces:
            pieces.append(text[end:])
        return pieces

    @abstractmethod
    def _encode_ordinary(self, text: str, at_start: bool) -> list[int]:
        """Ids of well-formed text, never a control token. at_start: nothing stands before it."""

    # -- ids → text

    @abstractmethod
    def token_bytes(self, id: int) -> bytes:
        """Return the exact bytes of a token (control tokens: their text); b"" for an unknown id."""

    def first_token_bytes(self, id: int) -> bytes:
        """As ``token_bytes`` for a text's first token; SentencePiece drops its leading space."""
        return self.token_bytes(id)

    def is_skipped(self, id: int) -> bool:
        """Whether decode(skip_special=True) leaves this id out."""
        return id in self._skipped

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD, ids outside the vocabulary
        nothing.
        """
        chunks: list[bytes] = []
        opened = False
        for id in ids:
            if skip_special and id in self._skipped:
                continue
            data = self.token_bytes(id)
            chunks.append(data if opened else self.first_token_bytes(id))
            opened = opened or bool(data)
        if not self.each_byte:
            return b"".join(chunks).decode("utf-8", errors="replace")
        stream = Utf8Stream(each_byte=True)
        return "".join(map(stream.push, chunks)) + stream.flush()

    def check_against(self, vocab_rows: int) -> None:
        """Raises TokenizerError when ids of this tokenizer exceed an embedding of `vocab_rows`
        rows.
        """
        if self.vocab_size > vocab_rows:
            raise TokenizerError(
                f"the tokenizer has ids up to {self.vocab_size - 1} but the model embeds only "
                f"{vocab_rows} tokens; "
                "they do not belong together: give the tokenizer that came with this model"
            )


def replace_surrogates(text: str) -> str:
    """`text` without lone surrogates (JSON may carry them, UTF-8 cannot): they become U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _is_word_char(char: str) -> bool:
    """Whether a character (or none) belongs to a word, as the regular expressions of the tokenizers
    library say.
    """
    if not char:
        return False
    category = unicodedata.category(char)
    return (
        category[0] in "LM"
        or category in ("Nd", "Nl", "Pc")
        or char in _JOINERS
        or _is_circled_letter(ord(char))
    )


def _is_circled_letter(code: int) -> bool:
    """Letters in circles and squares, which count as alphabetic."""
    return 0x24B6 <= code <= 0x24E9 or any(
        low <= code <= low + 25 for low in (0x1F130, 0x1F150, 0x1F170)
    )


def _special_pattern(texts: Sequence[str]) -> re.Pattern[str] | None:
    """One pattern for all control tokens, the longest first."""
    if not texts:
        return None
    try:
        return re.compile(regex_union(texts))
    except (RecursionError, OverflowError, re.error):
        raise TokenizerError(
            "the tokenizer's control tokens are nested too deeply to be searched for"
        ) from None
