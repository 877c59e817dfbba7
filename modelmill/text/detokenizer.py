"""Incremental detokenization: for each token, the text that it completes.

Invalid UTF-8 is replaced in two ways, because the two families of tokenizers differ: byte-level BPE
has one U+FFFD for each broken sequence (as ``bytes.decode(errors="replace")`` does), SentencePiece
one for each broken byte.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modelmill.text.tokenizer_base import Tokenizer

REPLACEMENT_CHAR = "\ufffd"


class IncrementalUtf8Decoder:
    """Decodes UTF-8 piece by piece into text that never changes later.

    At most three bytes are buffered.
    """

    def __init__(self, *, each_byte: bool = False) -> None:
        self._each_byte = each_byte
        self._tail = b""

    def push(self, data: bytes) -> str:
        """Return the text that `data` completes; an unfinished character stays buffered."""
        return self._decode(data, final=False)

    def flush(self) -> str:
        """Return the rest at the end: U+FFFD for an unfinished character, else ""."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool) -> str:
        data = self._tail + data
        done: list[str] = []
        start = 0
        while True:
            try:
                text, used = codecs.utf_8_decode(data[start:], "strict", final)
            except UnicodeDecodeError as error:
                done.append(data[start : start + error.start].decode("utf-8"))
                done.append(REPLACEMENT_CHAR * (error.end - error.start if self._each_byte else 1))
                start += error.end
                continue
            done.append(text)
            self._tail = data[start + used :]
            return "".join(done)


class Detokenizer:
    """Turns the ids of one sequence into text as they come.

    The results of all pushes and of the final flush concatenate to exactly
    ``tokenizer.decode(ids)``; if the sequence ``continues_prompt``, to exactly the text it adds.
    Text is returned only once it cannot change any more: no character is split or changed later.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        shown_special: Collection[int] = (),
        continues_prompt: bool = False,
    ) -> None:
        """Start a sequence.

        Args:
            tokenizer: the tokenizer of the ids.
            skip_special: whether control tokens are left out of the text.
            shown_special: control tokens that are written nevertheless.
            continues_prompt: whether the ids continue a text; the first id then keeps the space
                that SentencePiece would drop.
        """
        self._tokenizer, self._shown_special = tokenizer, shown_special
        self._skip_special = skip_special
        self._utf8 = IncrementalUtf8Decoder(each_byte=tokenizer.each_byte)
        self._continues_prompt, self._has_text = continues_prompt, False

    def push_prompt_token(self, id: int) -> str:
        """Add a prompt id before the sequence; control tokens are not written.

        A character that such ids leave incomplete belongs to the sequence.
        """
        return (
            ""
            if self._tokenizer.is_skipped_in_decode(id)
            else self._decode_token(id, self._has_text)
        )

    def push(self, id: int) -> str:
        """Return the text that this id completes; "" while a character is unfinished."""
        if (
            self._skip_special
            and self._tokenizer.is_skipped_in_decode(id)
            and id not in self._shown_special
        ):
            return ""
        return self._decode_token(id, self._has_text or self._continues_prompt)

    def fork(self) -> Detokenizer:
        """Return a copy in the same state."""
        other = copy.copy(self)
        other._utf8 = copy.copy(self._utf8)
        return other

    def _decode_token(self, id: int, has_text: bool) -> str:
        data = self._tokenizer.token_bytes(id)
        text = self._utf8.push(data if has_text else self._tokenizer.token_bytes_at_text_start(id))
        self._has_text = self._has_text or bool(data)
        return text

    def flush(self) -> str:
        """Return the end of the text: U+FFFD for an incomplete character, else nothing."""
        return self._utf8.flush()
