"""The interface of all tokenizers, whatever file they were loaded from.

Text is encoded into control tokens (``special``) only if the caller sets ``special=True``:
``<|im_end|>`` typed by a user is ordinary text.
"""

from __future__ import annotations

import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from modelmill.core.errors import PromptTokenCounts, PromptTooLong, TokenizerError
from modelmill.text.detokenizer import IncrementalUtf8Decoder
from modelmill.text.trie_regex import trie_regex

# Unicode's White_Space property; str.isspace has four control characters more
WHITESPACE = frozenset("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | frozenset(
    map(chr, range(0x2000, 0x200B))
)
_JOINERS = "\u200c\u200d"
COUNT_CHUNK_CHARS = 16384
"""Characters that are tokenized at a time to count the tokens of a long text."""
MAX_TOKENS_ADDED_BY_CUT = 8
"""Maximum tokens that cutting a text may add."""


@dataclass(frozen=True)
class VocabInfo:
    """The facts about a vocabulary that do not depend on how it splits text."""

    tokenizer_type: str  # "hf", "tiktoken", "tekken", "sentencepiece", "gguf-bpe" …
    vocab_size: int  # the highest id + 1
    special: Mapping[str, int]  # control tokens: their text → id
    skipped_ids: frozenset[int]  # ids that decode(skip_special=True) leaves out
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    prefix: tuple[int, ...] = ()  # ids that bos=None puts before the text
    suffix: tuple[int, ...] = ()  # ids that bos=None puts after the text
    # bos_token, eos_token, … for templates
    template_names: Mapping[str, str] = field(default_factory=dict)
    # of control tokens: whether it strips whitespace to its left and right, and whether it must
    # not touch a word (AddedToken's lstrip, rstrip, single_word)
    edges: Mapping[str, tuple[bool, bool, bool]] = field(default_factory=dict)


class Tokenizer(ABC):
    """Text ↔ token ids. Thread-safe: only caches change after construction."""

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
        self._context: int | None = None  # tokens that the engine takes; None: not known
        self._skipped = traits.skipped_ids
        self._prefix = list(traits.prefix)
        self._suffix = list(traits.suffix)
        # a control token of one character looks like ordinary text, so text never becomes one
        self._special_pattern = _compile_special_pattern(
            [text for text in traits.special if len(text) > 1]
        )
        self._edges = {text: edges for text, edges in traits.edges.items() if any(edges)}

    def set_input_token_limit(self, max_tokens: int, context: int | None = None) -> None:
        """Refuse texts of more than ``max_tokens`` tokens from now on.

        Args:
            max_tokens: of one text.
            context: tokens that the engine takes, which are fewer; the error says them.
        """
        self.max_tokens, self._context = max_tokens, context

    # -- text → ids

    def encode(self, text: str, *, bos: bool | None = None, special: bool = False) -> list[int]:
        """Encode a text.

        Args:
            text: any string; lone surrogates become U+FFFD.
            bos: True puts bos_id first, False nothing, None this tokenizer's default.
            special: whether control tokens in the text become their ids; otherwise they are
                encoded like any other text.

        Raises:
            TokenizerError: if bos is True and the vocabulary has no BOS token, or the text is too
                long.
        """
        text = replace_surrogates(text)
        pieces = self.split_control_tokens(text) if special else [text]
        ids = self.encode_pieces(pieces)
        if bos is None:
            return [*self._prefix, *ids, *self._suffix]
        if bos and self.bos_id is None:
            raise TokenizerError(
                "this tokenizer has no beginning-of-text token; encode with bos=False"
            )
        return [self.bos_id, *ids] if bos and self.bos_id is not None else ids

    def encode_beginning(self, text: str, max_tokens: int) -> list[int]:
        """Encode a text as ``encode`` does, but only its beginning if it has more tokens.

        What the tokenizer puts before and after every text is kept, and counts.

        Args:
            text: any string.
            max_tokens: at least 1.

        Raises:
            TokenizerError: as ``encode``.
        """
        ids = self.encode_pieces([replace_surrogates(text)])
        room = max(max_tokens - len(self._prefix) - len(self._suffix), 0)
        return [*self._prefix, *ids[:room], *self._suffix][:max_tokens]

    def encode_pieces(self, pieces: Iterable[str | int]) -> list[int]:
        """Encode pieces that are text (str) or ids (int); no BOS, no control tokens from text."""
        ids: list[int] = []
        at_start = True
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            elif piece:
                text = replace_surrogates(piece)
                self._check_token_count(text)
                ids.extend(self._encode_ordinary(text, at_start))
            at_start = False
        return ids

    def _check_token_count(self, text: str) -> None:
        """Check the number of tokens; in parts, since tokenizing takes 500 bytes per token.

        Raises:
            PromptTooLong: if the text has more than ``max_tokens`` tokens.
        """
        if self.max_tokens is None or len(text) <= self.max_tokens:
            return
        count = 0
        for at in range(0, len(text), COUNT_CHUNK_CHARS):
            count += max(
                len(self._encode_ordinary(text[at : at + COUNT_CHUNK_CHARS], at == 0))
                - MAX_TOKENS_ADDED_BY_CUT,
                0,
            )
            if count > self.max_tokens:
                takes = "" if self._context is None else f", this engine takes {self._context}"
                limit = self.max_tokens if self._context is None else self._context
                raise PromptTooLong(
                    f"the prompt has more than {self.max_tokens} tokens{takes}; shorten it",
                    PromptTokenCounts(self.max_tokens, limit, counts_all=False),
                )

    def split_control_tokens(self, text: str) -> list[str | int]:
        """Split `text` at its control tokens: ordinary text as str, control tokens as their ids."""
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
        """Encode well-formed text without control tokens; at_start: the text starts the prompt."""

    # -- ids → text

    @abstractmethod
    def token_bytes(self, id: int) -> bytes:
        """Return the exact bytes of a token (control tokens: their text); b"" for an unknown id."""

    def token_bytes_at_text_start(self, id: int) -> bytes:
        """Return the bytes of a text's first token; SentencePiece drops its leading space."""
        return self.token_bytes(id)

    def is_skipped_in_decode(self, id: int) -> bool:
        """Return whether decode(skip_special=True) leaves this id out."""
        return id in self._skipped

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Decode ids; invalid UTF-8 becomes U+FFFD, and ids outside the vocabulary are skipped."""
        chunks: list[bytes] = []
        has_text = False
        for id in ids:
            if skip_special and id in self._skipped:
                continue
            data = self.token_bytes(id)
            chunks.append(data if has_text else self.token_bytes_at_text_start(id))
            has_text = has_text or bool(data)
        if not self.each_byte:
            return b"".join(chunks).decode("utf-8", errors="replace")
        stream = IncrementalUtf8Decoder(each_byte=True)
        return "".join(map(stream.push, chunks)) + stream.flush()

    def check_ids_fit_embedding(self, vocab_rows: int) -> None:
        """Check that all ids fit into an embedding of `vocab_rows` rows.

        Raises:
            TokenizerError: if the tokenizer has higher ids.
        """
        if self.vocab_size > vocab_rows:
            raise TokenizerError(
                f"the tokenizer has ids up to {self.vocab_size - 1} but the model embeds only "
                f"{vocab_rows} tokens; give the tokenizer that came with this model"
            )


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates by U+FFFD; JSON may contain them, UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _is_word_char(char: str) -> bool:
    r"""Whether a character (or "") matches \w in the tokenizers library."""
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
    """Whether a code point is a letter in a circle or square, which is alphabetic."""
    return 0x24B6 <= code <= 0x24E9 or any(
        low <= code <= low + 25 for low in (0x1F130, 0x1F150, 0x1F170)
    )


def _compile_special_pattern(texts: Sequence[str]) -> re.Pattern[str] | None:
    """Return one pattern of all control tokens, longest first; None if there are none."""
    if not texts:
        return None
    try:
        return re.compile(trie_regex(texts))
    except (RecursionError, OverflowError, re.error):
        raise TokenizerError(
            "the tokenizer's control tokens are nested too deeply to be searched for"
        ) from None
